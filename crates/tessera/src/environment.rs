//! Environment variables that change what GPU libraries and this program do. Ranks compare those
//! that select algorithms, and report the unknown ones.

use std::collections::BTreeMap;

/// Whether ranks may have different values of a variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VariableRule {
    /// A difference ends the run before the first call.
    MustBeEqual,
    /// The value describes the host or selects what is printed, so it is not compared.
    MayDiffer,
}

/// An environment variable with its rule and the reason.
#[derive(Debug, Clone, Copy)]
pub struct Variable {
    /// Name of the variable, such as `NCCL_ALGO`.
    pub name: &'static str,
    /// Whether ranks may have different values.
    pub rule: VariableRule,
    /// What the variable changes; shown on the reference page.
    pub effect: &'static str,
}

/// Beginnings of the names of all variables that a rank reads or reports.
const PREFIXES: [&str; 6] = ["CUBLAS", "CUDA_", "CUDNN_", "NCCL_", "NVIDIA_", "TESSERA_"];

/// Longest value that a message repeats, in bytes; a longer one is shown by its digest.
const MAX_SHOWN_BYTES: usize = 120;

macro_rules! variables {
    ($($rule:ident { $($name:literal $effect:literal,)* })*) => {
        &[$($(Variable { name: $name, rule: VariableRule::$rule, effect: $effect },)*)*]
    };
}

/// The variables whose effect is known, sorted by rule and name.
pub static VARIABLES: &[Variable] = variables! {
    MustBeEqual {
        "CUBLASLT_WORKSPACE_SIZE" "Limits the algorithms that cuBLASLt may select",
        "CUBLAS_WORKSPACE_CONFIG" "Limits the algorithms that cuBLAS may select",
        "CUDA_DEVICE_MAX_CONNECTIONS" "Changes the order in which streams start",
        "CUDA_DISABLE_PTX_JIT" "Selects other machine code",
        "CUDA_FORCE_PTX_JIT" "Selects other machine code",
        "CUDA_LAUNCH_BLOCKING" "Makes every launch on this rank wait",
        "CUDA_MODULE_LOADING" "Moves the loading of kernels into the first call",
        "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT" "Limits the attention kernels that cuDNN may select",
        "NCCL_ALGO" "Selects the algorithm, and with it the order of sums",
        "NCCL_BUFFSIZE" "Divides messages into other pieces",
        "NCCL_COLLNET_ENABLE" "Lets switches add",
        "NCCL_CONF_FILE" "Names a file with any of these settings",
        "NCCL_CUMEM_ENABLE" "Selects other memory for buffers",
        "NCCL_GRAPH_FILE" "Replaces the search for rings and trees",
        "NCCL_GRAPH_MIXING_SUPPORT" "Changes how captured and other launches are ordered",
        "NCCL_GRAPH_REGISTER" "Registers the buffers of captured graphs",
        "NCCL_IB_DISABLE" "Selects another transport between hosts",
        "NCCL_LAUNCH_MODE" "Changes how a group of launches starts",
        "NCCL_MAX_CTAS" "Changes the number of channels",
        "NCCL_MAX_NCHANNELS" "Changes the number of channels, and with it the order of sums",
        "NCCL_MIN_CTAS" "Changes the number of channels",
        "NCCL_MIN_NCHANNELS" "Changes the number of channels, and with it the order of sums",
        "NCCL_NET" "Selects another transport between hosts",
        "NCCL_NTHREADS" "Changes the threads per block, and with them the order of sums",
        "NCCL_NVLS_ENABLE" "Lets NVSwitch add; the sums then depend on earlier allocations",
        "NCCL_P2P_DISABLE" "Selects another transport between GPUs",
        "NCCL_P2P_LEVEL" "Selects another transport between GPUs",
        "NCCL_PROTO" "Selects the protocol",
        "NCCL_SHM_DISABLE" "Selects another transport between processes",
        "NCCL_TOPO_FILE" "Replaces the detected topology",
        "NCCL_TUNER_PLUGIN" "Lets a library select algorithms",
        "NVIDIA_TF32_OVERRIDE" "Computes f32 matmuls in tf32, or forbids it",
        "TESSERA_MASK_FEATURES" "Hides features of the GPU, so that other kernels run",
    }
    MayDiffer {
        "CUDA_CACHE_MAXSIZE" "Size of a cache",
        "CUDA_CACHE_PATH" "Folder of a cache",
        "CUDA_DEVICE_ORDER" "Numbers of the GPUs on this host",
        "CUDA_HOME" "Folder of the toolkit; library versions are compared",
        "CUDA_PATH" "Folder of the toolkit; library versions are compared",
        "CUDA_VERSION" "Label of a container image; library versions are compared",
        "CUDA_VISIBLE_DEVICES" "GPUs of this process; their model is compared",
        "NCCL_DEBUG" "Amount of messages",
        "NCCL_DEBUG_FILE" "File of messages",
        "NCCL_DEBUG_SUBSYS" "Kinds of messages",
        "NCCL_HOSTID" "Identity of this host",
        "NCCL_IB_HCA" "Network adapters of this host",
        "NCCL_SOCKET_IFNAME" "Network interfaces of this host",
        "NCCL_VERSION" "Label of a container image; library versions are compared",
        "NVIDIA_DRIVER_CAPABILITIES" "What a container may use",
        "NVIDIA_VISIBLE_DEVICES" "GPUs of this container; their model is compared",
        "TESSERA_BIN" "Path of the executable that tests start; its digest is compared",
        "TESSERA_CUDA_LIBS" "Folders of libraries; their versions are compared",
        "TESSERA_FILETESTS" "Folder of files that tests read",
        "TESSERA_HOST_PROCESS" "Process that started the ranks of this host",
        "TESSERA_KERNELS" "Folder of a cache",
        "TESSERA_REQUIRE_GPUS" "Number of GPUs without which tests fail",
        "TESSERA_ROOT" "Folder of the project for tests; no rank reads it",
        "TESSERA_SECRET_FILE" "Path of the run's secret on this host; the ranks prove that they hold the same secret",
    }
};

/// Returns parity keys for the variables of an environment: those that must be equal, and the
/// unknown ones.
pub(crate) fn environment_keys(vars: impl IntoIterator<Item = (String, String)>) -> BTreeMap<String, String> {
    let known = vars.into_iter().filter(|(name, _)| PREFIXES.iter().any(|p| name.starts_with(p)));
    let keys = known.filter_map(|(name, value)| {
        let key = match VARIABLES.iter().find(|v| v.name == name).map(|v| v.rule) {
            Some(VariableRule::MustBeEqual) => format!("environment: {name}"),
            Some(VariableRule::MayDiffer) => return None,
            None => format!("other environment: {name}"),
        };
        let value = match value.len() {
            0..=MAX_SHOWN_BYTES => value,
            n => format!("{n} bytes, {}", &blake3::hash(value.as_bytes()).to_hex()[..16]),
        };
        Some((key, value))
    });
    keys.collect()
}

/// Returns the environment of this process; bytes that are not UTF-8 are replaced.
pub fn process_environment() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().map(|(n, v)| (n.to_string_lossy().into_owned(), v.to_string_lossy().into_owned()))
}

/// Renders docs/reference/environment.md: every variable with its rule and its effect.
#[must_use]
pub fn environment_reference() -> String {
    let mut out = "# Environment variables of ranks\n\n\
Before the first call the ranks compare the variables that select algorithms; a difference is T0740 with the variable, both\n\
values and the ranks. A variable that is not set differs from one that is. Any other variable whose name begins with "
        .to_string();
    out += &PREFIXES.map(|p| format!("`{p}`")).join(", ");
    out += " is\nunknown: a difference is a note in the record. This page is generated from the table in the code.\n\n\
| variable | over the ranks | effect |\n| --- | --- | --- |\n";
    for v in VARIABLES {
        let rule = match v.rule {
            VariableRule::MustBeEqual => "must be equal",
            VariableRule::MayDiffer => "may differ",
        };
        out += &format!("| `{}` | {rule} | {} |\n", v.name, v.effect);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_is_compared_or_reported_or_ignored() {
        let set = |n: &str, v: &str| (n.to_string(), v.to_string());
        let long = "x".repeat(1000);
        let keys = environment_keys([
            set("NCCL_ALGO", "Ring"),
            set("NCCL_HOSTID", "a"),
            set("TESSERA_ROOT", "/a"),
            set("TESSERA_BIN", "/a/tessera"),
            set("NCCL_FUTURE", &long),
            set("PATH", "/bin"),
        ]);
        assert_eq!(keys.len(), 2, "{keys:?}");
        assert_eq!(keys["environment: NCCL_ALGO"], "Ring");
        assert!(keys["other environment: NCCL_FUTURE"].starts_with("1000 bytes, "), "{keys:?}");
    }

    #[test]
    fn each_variable_has_one_row_and_a_known_beginning() {
        for (i, v) in VARIABLES.iter().enumerate() {
            assert!(VARIABLES[..i].iter().all(|w| w.name != v.name), "{}", v.name);
            assert!(PREFIXES.iter().any(|p| v.name.starts_with(p)), "{}", v.name);
        }
    }

    #[test]
    fn the_reference_page_is_up_to_date() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/environment.md");
        if std::env::var_os("TESSERA_BLESS").is_some() {
            std::fs::write(path, environment_reference()).unwrap();
        }
        let page = std::fs::read_to_string(path).unwrap_or_default();
        assert!(page == environment_reference(), "{path} is out of date: run this test with TESSERA_BLESS=1");
    }
}
