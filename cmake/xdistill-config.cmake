# find_package(xdistill): xdistill::xdistill is the header, for a program with a file that defines XDISTILL_IMPLEMENTATION;
# xdistill::lib is the compiled library, for a program without one. COMPONENTS mpi, nccl, cuda add the companions as targets.
include(CMakeFindDependencyMacro)
find_dependency(Threads)

# This file is in share/cmake/xdistill; vcpkg moves it to share/xdistill.
get_filename_component(xdistill_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT EXISTS "${xdistill_prefix}/include/xdistill.h")
    get_filename_component(xdistill_prefix "${CMAKE_CURRENT_LIST_DIR}/../.." ABSOLUTE)
endif()
if(NOT TARGET xdistill::xdistill)
    add_library(xdistill::xdistill INTERFACE IMPORTED)
    set_target_properties(xdistill::xdistill PROPERTIES
        INTERFACE_INCLUDE_DIRECTORIES "${xdistill_prefix}/include"
        INTERFACE_LINK_LIBRARIES "Threads::Threads;$<$<NOT:$<BOOL:${WIN32}>>:m>")
    find_library(xdistill_library NAMES libxdistill.a xdistill PATHS "${xdistill_prefix}/lib" NO_DEFAULT_PATH NO_CACHE)
    if(xdistill_library)
        add_library(xdistill::lib UNKNOWN IMPORTED)
        set_target_properties(xdistill::lib PROPERTIES
            IMPORTED_LOCATION "${xdistill_library}"
            INTERFACE_LINK_LIBRARIES xdistill::xdistill)
    endif()
    unset(xdistill_library)
endif()

include("${CMAKE_CURRENT_LIST_DIR}/xdistill-companions.cmake")
xdistill_add_companions("${xdistill_prefix}/include" ${xdistill_FIND_COMPONENTS})
unset(xdistill_prefix)
