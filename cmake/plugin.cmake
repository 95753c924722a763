# SPDX-License-Identifier: Apache-2.0
#
# Decides whether the TensorRT plugin library libhubkv_plugin is built.
#
#   HUBKV_PLUGIN=ON    build it; an error where TensorRT's or CUDA's headers are missing. Over a core without CUDA kernels
#                      its plugins load, describe themselves and refuse to run
#   HUBKV_PLUGIN=OFF   never
#   HUBKV_PLUGIN=AUTO  build it where the CUDA kernels are built and the headers are found
#
# TensorRT's headers (10.14 or newer): TENSORRT_ROOT, the system's, then the wheel kernel-lens of the Python in use.
set(HUBKV_PLUGIN AUTO CACHE STRING "Build the TensorRT plugin library: AUTO, ON or OFF")
set_property(CACHE HUBKV_PLUGIN PROPERTY STRINGS AUTO ON OFF)
if(NOT HUBKV_PLUGIN MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "HUBKV_PLUGIN: '${HUBKV_PLUGIN}' is not AUTO, ON or OFF")
endif()

# Where files of a wheel lie that the Python in use has: hubkv_wheel_folder(result package folder)
function(hubkv_wheel_folder result package folder)
    find_package(Python3 COMPONENTS Interpreter QUIET)
    if(Python3_EXECUTABLE)
        execute_process(COMMAND ${Python3_EXECUTABLE} -c
            "import importlib.util as u; print(';'.join(p + '/${folder}' for p in u.find_spec('${package}').submodule_search_locations))"
            OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    endif()
    set(${result} ${found} PARENT_SCOPE)
endfunction()

set(HUBKV_BUILD_PLUGIN FALSE)
if(HUBKV_PLUGIN STREQUAL "ON" OR (HUBKV_PLUGIN STREQUAL "AUTO" AND HUBKV_WITH_CUDA))
    find_path(HUBKV_TENSORRT_HEADERS NvInfer.h HINTS ${TENSORRT_ROOT} $ENV{TENSORRT_ROOT} PATHS /usr/local/tensorrt
        PATH_SUFFIXES include include/${CMAKE_LIBRARY_ARCHITECTURE} DOC "Folder with TensorRT's NvInfer.h")
    if(NOT HUBKV_TENSORRT_HEADERS)
        hubkv_wheel_folder(wheel kernel_lens include/tensorrt)
        find_path(HUBKV_TENSORRT_HEADERS NvInfer.h HINTS ${wheel} NO_DEFAULT_PATH)
    endif()
    find_path(HUBKV_CUDA_RUNTIME_HEADERS cuda_runtime_api.h HINTS ${HUBKV_CUDA_ROOT} ${CUDAToolkit_ROOT}
        $ENV{CUDAToolkit_ROOT} $ENV{CUDA_HOME} $ENV{CUDA_PATH} PATHS /usr/local/cuda
        PATH_SUFFIXES include targets/${CMAKE_SYSTEM_PROCESSOR}-linux/include DOC "Folder with cuda_runtime_api.h")
    if(NOT HUBKV_CUDA_RUNTIME_HEADERS)
        hubkv_wheel_folder(wheel nvidia cu13/include)
        find_path(HUBKV_CUDA_RUNTIME_HEADERS cuda_runtime_api.h HINTS ${wheel} NO_DEFAULT_PATH)
    endif()
    if(HUBKV_TENSORRT_HEADERS AND HUBKV_CUDA_RUNTIME_HEADERS)
        set(HUBKV_BUILD_PLUGIN TRUE)
    elseif(HUBKV_PLUGIN STREQUAL "ON")
        message(FATAL_ERROR "HUBKV_PLUGIN=ON: no headers of TensorRT ('${HUBKV_TENSORRT_HEADERS}') or of CUDA "
            "('${HUBKV_CUDA_RUNTIME_HEADERS}'). Set TENSORRT_ROOT, or pip install --no-deps kernel-lens; install the CUDA "
            "toolkit, or pip install nvidia-cuda-runtime nvidia-cuda-crt")
    endif()
endif()
message(STATUS "TensorRT plugins (HUBKV_PLUGIN=${HUBKV_PLUGIN}): ${HUBKV_BUILD_PLUGIN} ${HUBKV_TENSORRT_HEADERS}")

# hubkv_add_plugin(target objects...): the plugin library over the objects of a core, which stay inside it.
function(hubkv_add_plugin target)
    file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/plugin/*.cpp)
    add_library(${target} SHARED ${sources} ${ARGN})
    target_compile_features(${target} PRIVATE cxx_std_17)
    target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/cpp/include)
    target_include_directories(${target} SYSTEM PRIVATE ${HUBKV_TENSORRT_HEADERS} ${HUBKV_CUDA_RUNTIME_HEADERS})
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wno-deprecated-declarations>"
        "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${HUBKV_WERROR}>>:-Werror>")
    set(exports ${PROJECT_SOURCE_DIR}/plugin/exports.map)
    target_link_options(${target} PRIVATE -Wl,--version-script=${exports} -Wl,--exclude-libs,ALL)
    target_link_libraries(${target} PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
    set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX CXX_EXTENSIONS OFF CXX_VISIBILITY_PRESET hidden
        VISIBILITY_INLINES_HIDDEN ON LINK_DEPENDS ${exports})
endfunction()

function(hubkv_add_plugin_library)
    hubkv_add_plugin(hubkv_plugin $<TARGET_OBJECTS:hubkv>)
    target_link_options(hubkv_plugin PRIVATE -Wl,-z,defs)
    if(HUBKV_WITH_CUDA)
        target_compile_definitions(hubkv_plugin PRIVATE HUBKV_WITH_CUDA)
        target_link_libraries(hubkv_plugin PRIVATE ${HUBKV_CUDART} rt)
        set_target_properties(hubkv_plugin PROPERTIES CUDA_RUNTIME_LIBRARY None)
    endif()
endfunction()
