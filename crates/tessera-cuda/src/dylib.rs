//! Typed function tables of the dynamically loaded libraries.
//!
//! Every entry is an `unsafe` function: the libraries follow the handles and addresses that they are
//! given without a check. The tables do not end, because a loaded library is never unloaded.
//!
//! Types and constants come from cudarc. Its loader is not used because it chooses the search path
//! itself: the functions must come from exactly the file that `tessera doctor` lists.

#![allow(unsafe_code, reason = "library symbols are looked up by their documented types")]

use std::ffi::{c_char, c_int, c_void};

use cudarc::cublaslt::sys as lt;
use cudarc::cudnn::sys as dnn;
use cudarc::driver::sys::CUstream;
use cudarc::nccl::sys as nccl;
use cudarc::nvrtc::sys as rtc;
use tessera_base::Diagnostic;

use crate::codes::T1301;
use crate::libraries::{Libraries, Library};

macro_rules! function_table {
    ($(#[$doc:meta])* $table:ident of $library:ident { $($field:ident = $symbol:literal : fn($($arg:ty),*) -> $ret:ty;)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub(crate) struct $table {
            $(
                // SAFETY: a type only; each call states why its arguments are valid.
                pub(crate) $field: unsafe extern "C" fn($($arg),*) -> $ret,
            )*
        }

        impl $table {
            /// Looks up all functions of the loaded library.
            ///
            /// # Errors
            /// The name of a function that the library does not have.
            pub(crate) fn find_symbols(libraries: &Libraries) -> Result<$table, &'static str> {
                Ok($table {
                    $($field: {
                        // SAFETY: the library documents this type for the symbol.
                        let symbol = unsafe { libraries.get_symbol::<unsafe extern "C" fn($($arg),*) -> $ret>(Library::$library, $symbol) };
                        *symbol.ok_or($symbol)?
                    },)*
                })
            }
        }
    };
}

macro_rules! load_or_explain {
    ($($table:ident of $library:ident),*) => {
        $(impl $table {
            /// Looks up all functions of the library, if it was loaded.
            pub(crate) fn load(libraries: &Libraries) -> Result<$table, Diagnostic> {
                libraries.check_loaded(Library::$library)?;
                $table::find_symbols(libraries).map_err(|s| missing_symbol(libraries, Library::$library, s))
            }
        })*
    };
}

load_or_explain!(Nvrtc of Nvrtc, CublasLt of CublasLt, Cudnn of Cudnn);

function_table! {
    /// Functions of NVRTC, which compile CUDA source to a cubin at run time.
    Nvrtc of Nvrtc {
        version = "nvrtcVersion": fn(*mut c_int, *mut c_int) -> rtc::nvrtcResult;
        create = "nvrtcCreateProgram": fn(*mut rtc::nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> rtc::nvrtcResult;
        compile = "nvrtcCompileProgram": fn(rtc::nvrtcProgram, c_int, *const *const c_char) -> rtc::nvrtcResult;
        cubin_size = "nvrtcGetCUBINSize": fn(rtc::nvrtcProgram, *mut usize) -> rtc::nvrtcResult;
        cubin = "nvrtcGetCUBIN": fn(rtc::nvrtcProgram, *mut c_char) -> rtc::nvrtcResult;
        log_size = "nvrtcGetProgramLogSize": fn(rtc::nvrtcProgram, *mut usize) -> rtc::nvrtcResult;
        log = "nvrtcGetProgramLog": fn(rtc::nvrtcProgram, *mut c_char) -> rtc::nvrtcResult;
        destroy = "nvrtcDestroyProgram": fn(*mut rtc::nvrtcProgram) -> rtc::nvrtcResult;
    }
}

function_table! {
    /// Functions of cuBLASLt that describe a GEMM, choose its algorithm and run it.
    CublasLt of CublasLt {
        version = "cublasLtGetVersion": fn() -> usize;
        create = "cublasLtCreate": fn(*mut lt::cublasLtHandle_t) -> lt::cublasStatus_t;
        destroy = "cublasLtDestroy": fn(lt::cublasLtHandle_t) -> lt::cublasStatus_t;
        desc_create = "cublasLtMatmulDescCreate": fn(*mut lt::cublasLtMatmulDesc_t, lt::cublasComputeType_t, lt::cudaDataType) -> lt::cublasStatus_t;
        desc_destroy = "cublasLtMatmulDescDestroy": fn(lt::cublasLtMatmulDesc_t) -> lt::cublasStatus_t;
        desc_set = "cublasLtMatmulDescSetAttribute": fn(lt::cublasLtMatmulDesc_t, lt::cublasLtMatmulDescAttributes_t, *const c_void, usize) -> lt::cublasStatus_t;
        layout_create = "cublasLtMatrixLayoutCreate": fn(*mut lt::cublasLtMatrixLayout_t, lt::cudaDataType, u64, u64, i64) -> lt::cublasStatus_t;
        layout_destroy = "cublasLtMatrixLayoutDestroy": fn(lt::cublasLtMatrixLayout_t) -> lt::cublasStatus_t;
        pref_create = "cublasLtMatmulPreferenceCreate": fn(*mut lt::cublasLtMatmulPreference_t) -> lt::cublasStatus_t;
        pref_destroy = "cublasLtMatmulPreferenceDestroy": fn(lt::cublasLtMatmulPreference_t) -> lt::cublasStatus_t;
        pref_set = "cublasLtMatmulPreferenceSetAttribute": fn(lt::cublasLtMatmulPreference_t, lt::cublasLtMatmulPreferenceAttributes_t, *const c_void, usize) -> lt::cublasStatus_t;
        heuristic = "cublasLtMatmulAlgoGetHeuristic": fn(lt::cublasLtHandle_t, lt::cublasLtMatmulDesc_t, lt::cublasLtMatrixLayout_t, lt::cublasLtMatrixLayout_t, lt::cublasLtMatrixLayout_t, lt::cublasLtMatrixLayout_t, lt::cublasLtMatmulPreference_t, c_int, *mut lt::cublasLtMatmulHeuristicResult_t, *mut c_int) -> lt::cublasStatus_t;
        algo_get = "cublasLtMatmulAlgoConfigGetAttribute": fn(*const lt::cublasLtMatmulAlgo_t, lt::cublasLtMatmulAlgoConfigAttributes_t, *mut c_void, usize, *mut usize) -> lt::cublasStatus_t;
        algo_set = "cublasLtMatmulAlgoConfigSetAttribute": fn(*mut lt::cublasLtMatmulAlgo_t, lt::cublasLtMatmulAlgoConfigAttributes_t, *const c_void, usize) -> lt::cublasStatus_t;
        algo_check = "cublasLtMatmulAlgoCheck": fn(lt::cublasLtHandle_t, lt::cublasLtMatmulDesc_t, lt::cublasLtMatrixLayout_t, lt::cublasLtMatrixLayout_t, lt::cublasLtMatrixLayout_t, lt::cublasLtMatrixLayout_t, *const lt::cublasLtMatmulAlgo_t, *mut lt::cublasLtMatmulHeuristicResult_t) -> lt::cublasStatus_t;
        matmul = "cublasLtMatmul": fn(lt::cublasLtHandle_t, lt::cublasLtMatmulDesc_t, *const c_void, *const c_void, lt::cublasLtMatrixLayout_t, *const c_void, lt::cublasLtMatrixLayout_t, *const c_void, *const c_void, lt::cublasLtMatrixLayout_t, *mut c_void, lt::cublasLtMatrixLayout_t, *const lt::cublasLtMatmulAlgo_t, *mut c_void, usize, lt::cudaStream_t) -> lt::cublasStatus_t;
    }
}

function_table! {
    /// Functions of cuDNN's backend (graph) API.
    Cudnn of Cudnn {
        create = "cudnnCreate": fn(*mut dnn::cudnnHandle_t) -> dnn::cudnnStatus_t;
        destroy = "cudnnDestroy": fn(dnn::cudnnHandle_t) -> dnn::cudnnStatus_t;
        set_stream = "cudnnSetStream": fn(dnn::cudnnHandle_t, dnn::cudaStream_t) -> dnn::cudnnStatus_t;
        last_error = "cudnnGetLastErrorString": fn(*mut c_char, usize) -> ();
        descriptor = "cudnnBackendCreateDescriptor": fn(dnn::cudnnBackendDescriptorType_t, *mut dnn::cudnnBackendDescriptor_t) -> dnn::cudnnStatus_t;
        drop = "cudnnBackendDestroyDescriptor": fn(dnn::cudnnBackendDescriptor_t) -> dnn::cudnnStatus_t;
        set = "cudnnBackendSetAttribute": fn(dnn::cudnnBackendDescriptor_t, dnn::cudnnBackendAttributeName_t, dnn::cudnnBackendAttributeType_t, i64, *const c_void) -> dnn::cudnnStatus_t;
        get = "cudnnBackendGetAttribute": fn(dnn::cudnnBackendDescriptor_t, dnn::cudnnBackendAttributeName_t, dnn::cudnnBackendAttributeType_t, i64, *mut i64, *mut c_void) -> dnn::cudnnStatus_t;
        finalize = "cudnnBackendFinalize": fn(dnn::cudnnBackendDescriptor_t) -> dnn::cudnnStatus_t;
        execute = "cudnnBackendExecute": fn(dnn::cudnnHandle_t, dnn::cudnnBackendDescriptor_t, dnn::cudnnBackendDescriptor_t) -> dnn::cudnnStatus_t;
    }
}

function_table! {
    /// Functions of NCCL. Results and enums are passed as numbers: a newer library may return one that
    /// the enums of cudarc do not have.
    Nccl of Nccl {
        get_unique_id = "ncclGetUniqueId": fn(*mut nccl::ncclUniqueId) -> c_int;
        init = "ncclCommInitRankConfig": fn(*mut nccl::ncclComm_t, c_int, nccl::ncclUniqueId, c_int, *mut nccl::ncclConfig_t) -> c_int;
        finalize = "ncclCommFinalize": fn(nccl::ncclComm_t) -> c_int;
        destroy = "ncclCommDestroy": fn(nccl::ncclComm_t) -> c_int;
        abort = "ncclCommAbort": fn(nccl::ncclComm_t) -> c_int;
        async_error = "ncclCommGetAsyncError": fn(nccl::ncclComm_t, *mut c_int) -> c_int;
        error_string = "ncclGetErrorString": fn(c_int) -> *const c_char;
        last_error = "ncclGetLastError": fn(nccl::ncclComm_t) -> *const c_char;
        all_reduce = "ncclAllReduce": fn(*const c_void, *mut c_void, usize, c_int, c_int, nccl::ncclComm_t, CUstream) -> c_int;
        all_gather = "ncclAllGather": fn(*const c_void, *mut c_void, usize, c_int, nccl::ncclComm_t, CUstream) -> c_int;
        reduce_scatter = "ncclReduceScatter": fn(*const c_void, *mut c_void, usize, c_int, c_int, nccl::ncclComm_t, CUstream) -> c_int;
        broadcast = "ncclBroadcast": fn(*const c_void, *mut c_void, usize, c_int, c_int, nccl::ncclComm_t, CUstream) -> c_int;
        send = "ncclSend": fn(*const c_void, usize, c_int, c_int, nccl::ncclComm_t, CUstream) -> c_int;
        recv = "ncclRecv": fn(*mut c_void, usize, c_int, c_int, nccl::ncclComm_t, CUstream) -> c_int;
        group_start = "ncclGroupStart": fn() -> c_int;
        group_end = "ncclGroupEnd": fn() -> c_int;
    }
}

impl CublasLt {
    /// Returns the library's version as one number, for example 130100.
    pub(crate) fn query_version(&self) -> usize {
        // SAFETY: the function has no precondition.
        unsafe { (self.version)() }
    }
}

fn missing_symbol(libraries: &Libraries, library: Library, symbol: &str) -> Diagnostic {
    let found = libraries.found.iter().find(|f| f.library == library);
    let version = libraries.describe_version(library);
    let d = Diagnostic::error(&T1301, format!("{} {version} has no {symbol}", library.name()));
    let d = match found {
        Some(f) => d.with_label(f.path.display().to_string(), "the loaded file"),
        None => d,
    };
    d.with_hint("a newer version is needed: TESSERA_CUDA_LIBS lists folders that are searched first")
}
