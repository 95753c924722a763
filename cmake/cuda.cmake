# SPDX-License-Identifier: Apache-2.0
#
# Decides whether the CUDA kernels are built, and gives the function hubkv_add_cuda(target).
#
#   HUBKV_CUDA=ON    build them for all architectures of HUBKV_CUDA_ARCHITECTURES; an error where there is no nvcc
#   HUBKV_CUDA=OFF   host kernels alone
#   HUBKV_CUDA=AUTO  build them where this machine could run them (nvcc works and a GPU's driver is there), for its own
#                    GPU. A machine without a GPU compiles no kernel and needs no nvcc.
#
# nvcc: CMAKE_CUDA_COMPILER, CUDACXX, then the toolkit in CUDAToolkit_ROOT, CUDA_HOME, CUDA_PATH, the search path and
# /usr/local/cuda, then the wheels nvidia-cuda-nvcc, -crt, -runtime, -cccl and nvidia-nvvm of the Python in use.
set(HUBKV_CUDA_ARCHITECTURES "" CACHE STRING
    "GPU architectures as CMAKE_CUDA_ARCHITECTURES has them; empty: see HUBKV_CUDA in cmake/cuda.cmake")
option(HUBKV_KERNEL_REPORT "Keep what build_scripts/kernel_report.py reads: the compiler's report and PTX of kernels" OFF)

function(hubkv_find_nvcc result)
    if(CMAKE_CUDA_COMPILER)
        set(${result} ${CMAKE_CUDA_COMPILER} PARENT_SCOPE)
        return()
    endif()
    if(DEFINED ENV{CUDACXX})
        set(${result} $ENV{CUDACXX} PARENT_SCOPE)
        return()
    endif()
    find_program(HUBKV_NVCC nvcc HINTS ${CUDAToolkit_ROOT} $ENV{CUDAToolkit_ROOT} $ENV{CUDA_HOME} $ENV{CUDA_PATH}
        PATHS /usr/local/cuda PATH_SUFFIXES bin)
    if(NOT HUBKV_NVCC)
        find_package(Python3 COMPONENTS Interpreter QUIET)
        if(Python3_EXECUTABLE)
            execute_process(COMMAND ${Python3_EXECUTABLE} -c "import nvidia; print(';'.join(nvidia.__path__))"
                OUTPUT_VARIABLE wheels OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
            find_program(HUBKV_NVCC nvcc HINTS ${wheels} PATH_SUFFIXES cu13/bin NO_DEFAULT_PATH)
        endif()
    endif()
    set(${result} ${HUBKV_NVCC} PARENT_SCOPE)
endfunction()

# The folder above bin, include and lib, as nvcc itself names it: the program found may be a link or a script.
function(hubkv_cuda_root nvcc result)
    execute_process(COMMAND ${nvcc} --dryrun -c -x cu /dev/null OUTPUT_VARIABLE said ERROR_VARIABLE said)
    if(said MATCHES "TOP=([^\r\n]+)")
        get_filename_component(root ${CMAKE_MATCH_1} REALPATH)
        set(${result} ${root} PARENT_SCOPE)
    endif()
endfunction()

set(HUBKV_WITH_CUDA FALSE)
if(HUBKV_CUDA STREQUAL "ON")
    set(HUBKV_WITH_CUDA TRUE)
elseif(HUBKV_CUDA STREQUAL "AUTO" AND (EXISTS /proc/driver/nvidia/version OR EXISTS /dev/nvidiactl OR EXISTS /dev/dxg))
    set(HUBKV_WITH_CUDA TRUE)
endif()

if(HUBKV_WITH_CUDA)
    hubkv_find_nvcc(HUBKV_NVCC_FOUND)
    if(HUBKV_NVCC_FOUND)
        hubkv_cuda_root(${HUBKV_NVCC_FOUND} HUBKV_CUDA_ROOT)
        find_library(HUBKV_CUDART NAMES libcudart_static.a
            PATHS ${HUBKV_CUDA_ROOT} ${HUBKV_CUDA_ROOT}/targets/${CMAKE_SYSTEM_PROCESSOR}-linux
            PATH_SUFFIXES lib64 lib NO_DEFAULT_PATH)
    endif()
    if(NOT HUBKV_NVCC_FOUND OR NOT HUBKV_CUDART)
        set(HUBKV_WITH_CUDA FALSE)
        if(HUBKV_CUDA STREQUAL "ON")
            message(FATAL_ERROR "HUBKV_CUDA=ON: no CUDA compiler (nvcc: '${HUBKV_NVCC_FOUND}', runtime: "
                "'${HUBKV_CUDART}'). Install the CUDA toolkit, or pip install nvidia-cuda-nvcc nvidia-cuda-crt "
                "nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl (13.0.*), or set CUDACXX")
        endif()
    endif()
endif()

if(HUBKV_WITH_CUDA)
    # CMake tries the compiler on a program; the libraries of wheels lie where nvcc does not look.
    get_filename_component(folder ${HUBKV_CUDART} DIRECTORY)
    set(ENV{LIBRARY_PATH} "${folder}:$ENV{LIBRARY_PATH}")
    set(ENV{CUDACXX} ${HUBKV_NVCC_FOUND})
    if(HUBKV_CUDA STREQUAL "AUTO")
        include(CheckLanguage)
        check_language(CUDA)
        if(NOT CMAKE_CUDA_COMPILER)
            set(HUBKV_WITH_CUDA FALSE)
        endif()
    endif()
endif()

if(HUBKV_WITH_CUDA)
    set(architectures ${HUBKV_CUDA_ARCHITECTURES})
    if(NOT architectures AND HUBKV_CUDA STREQUAL "AUTO" AND CMAKE_VERSION VERSION_GREATER_EQUAL 3.24)
        set(architectures native)
    elseif(NOT architectures)
        # Machine code from Ampere to Blackwell; GPUs that come later compile the last one's PTX.
        set(architectures 80-real 86-real 89-real 90-real 100-real 120)
    endif()
    set(CMAKE_CUDA_ARCHITECTURES ${architectures})
    set(CMAKE_CUDA_RUNTIME_LIBRARY None)
    enable_language(CUDA)
endif()
message(STATUS "CUDA kernels (HUBKV_CUDA=${HUBKV_CUDA}): ${HUBKV_WITH_CUDA} ${CMAKE_CUDA_ARCHITECTURES}")

# Gives the target the kernels of the stages and the runtime, linked statically.
function(hubkv_add_cuda target)
    file(GLOB kernels CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/cpp/*/*.cu)
    target_sources(${target} PRIVATE ${kernels})
    set_source_files_properties(${PROJECT_SOURCE_DIR}/cpp/refine/refine.cu
        ${PROJECT_SOURCE_DIR}/cpp/calibrate_top_p/calibrate_top_p.cu TARGET_DIRECTORY ${target}
        PROPERTIES COMPILE_OPTIONS -fmad=false) # bit-equal to the host
    set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON
        CUDA_EXTENSIONS OFF CUDA_VISIBILITY_PRESET hidden CUDA_RUNTIME_LIBRARY None)
    target_compile_definitions(${target} PRIVATE HUBKV_WITH_CUDA)
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>"
        "$<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${HUBKV_WERROR}>>:--Werror=all-warnings>")
    if(HUBKV_KERNEL_REPORT)
        file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/kernels)
        target_compile_options(${target} PRIVATE
            "$<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v;--keep;--keep-dir=${PROJECT_BINARY_DIR}/kernels>")
        set_target_properties(${target} PROPERTIES
            CUDA_COMPILER_LAUNCHER "sh;${PROJECT_SOURCE_DIR}/cmake/keep_report.sh")
    endif()
    target_link_libraries(${target} PRIVATE ${HUBKV_CUDART} Threads::Threads ${CMAKE_DL_LIBS} rt)
    target_link_options(${target} PRIVATE -Wl,--exclude-libs,ALL)
endfunction()
