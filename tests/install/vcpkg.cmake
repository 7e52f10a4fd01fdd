# Runs a port as vcpkg does, with functions that do what vcpkg's do of a release build: cmake -DPORT=DIR -DPREFIX=DIR -P vcpkg.cmake
cmake_minimum_required(VERSION 3.14)
set(CURRENT_PACKAGES_DIR "${PREFIX}")
set(port_build "${PREFIX}/../port-build")

function(port_run)
    execute_process(COMMAND ${ARGN} RESULT_VARIABLE status)
    if(NOT status EQUAL 0)
        message(FATAL_ERROR "${ARGN}: ${status}")
    endif()
endfunction()

function(vcpkg_cmake_configure)
    cmake_parse_arguments(PARSE_ARGV 0 arg "" "SOURCE_PATH" "OPTIONS")
    port_run(${CMAKE_COMMAND} -S "${arg_SOURCE_PATH}" -B "${port_build}" -DCMAKE_BUILD_TYPE=Release
        "-DCMAKE_INSTALL_PREFIX=${CURRENT_PACKAGES_DIR}" ${arg_OPTIONS})
endfunction()

function(vcpkg_cmake_install)
    port_run(${CMAKE_COMMAND} --build "${port_build}" --target install)
endfunction()

# Packages of CMake have to be in share/NAME.
function(vcpkg_cmake_config_fixup)
    cmake_parse_arguments(PARSE_ARGV 0 arg "" "PACKAGE_NAME;CONFIG_PATH" "")
    file(MAKE_DIRECTORY "${CURRENT_PACKAGES_DIR}/share")
    file(RENAME "${CURRENT_PACKAGES_DIR}/${arg_CONFIG_PATH}" "${CURRENT_PACKAGES_DIR}/share/${arg_PACKAGE_NAME}")
endfunction()

function(vcpkg_fixup_pkgconfig)
    if(NOT EXISTS "${CURRENT_PACKAGES_DIR}/share/pkgconfig/xdistill.pc")
        message(FATAL_ERROR "there is no xdistill.pc")
    endif()
endfunction()

function(vcpkg_install_copyright)
    cmake_parse_arguments(PARSE_ARGV 0 arg "" "" "FILE_LIST")
    foreach(file IN LISTS arg_FILE_LIST)
        if(NOT EXISTS "${file}")
            message(FATAL_ERROR "there is no ${file}")
        endif()
    endforeach()
endfunction()

include("${PORT}/portfile.cmake")

# The number that vcpkg shows is the library's.
file(READ "${PORT}/vcpkg.json" port_json)
file(READ "${PREFIX}/share/xdistill/xdistill-config-version.cmake" port_version)
string(REGEX MATCH "\"version\": \"([0-9.]+)\"" match "${port_json}")
if(NOT port_version MATCHES "\"${CMAKE_MATCH_1}\"")
    message(FATAL_ERROR "vcpkg.json has version ${CMAKE_MATCH_1}, the library another")
endif()
