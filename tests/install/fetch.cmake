# A project that fetches xdistill from an archive: cmake -DARCHIVE=xdistill-N.tar.gz.
cmake_minimum_required(VERSION 3.14)
project(use_xdistill LANGUAGES C)

include(FetchContent)
FetchContent_Declare(xdistill URL "${ARCHIVE}")
FetchContent_MakeAvailable(xdistill)

add_executable(app app.c)
target_link_libraries(app xdistill::xdistill)
