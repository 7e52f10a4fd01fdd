# find_package(xdistill): one interface target, xdistill::xdistill. The header is C99; nothing is built.
include(CMakeFindDependencyMacro)
find_dependency(Threads)

if(NOT TARGET xdistill::xdistill)
    get_filename_component(xdistill_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
    add_library(xdistill::xdistill INTERFACE IMPORTED)
    set_target_properties(xdistill::xdistill PROPERTIES
        INTERFACE_INCLUDE_DIRECTORIES "${xdistill_prefix}/include"
        INTERFACE_LINK_LIBRARIES "Threads::Threads;$<$<NOT:$<BOOL:${WIN32}>>:m>")
    unset(xdistill_prefix)
endif()
