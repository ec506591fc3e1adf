//! The environment file for the ranks of a plan: hints to libraries. A hint never overrides a
//! variable that the user has set.

use std::fmt::Write;

/// What a plan requires of NCCL and PyTorch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LibraryRequirements {
    /// Whether the plan uses all-to-all collectives; if so, `env.sh` asks NCCL for at least two
    /// channels.
    pub uses_all_to_all: bool,
    /// Results must not depend on earlier allocations.
    pub deterministic: bool,
}

/// Renders the file for a POSIX shell, to be sourced with `. ./env.sh` before the launcher.
#[must_use]
pub fn render_env(requirements: LibraryRequirements) -> String {
    let mut lines: Vec<(&str, &str, &str)> = Vec::new();
    if requirements.uses_all_to_all {
        let why = "all-to-all: at least two channels";
        lines.push(("NCCL_MIN_NCHANNELS", "2", why));
        lines.push(("NCCL_MIN_NRINGS", "2", "the same for older versions of NCCL"));
    }
    if requirements.deterministic {
        lines.push(("NCCL_NVLS_ENABLE", "0", "NVLS reductions depend on earlier allocations"));
    }
    lines.push((
        "PYTORCH_CUDA_ALLOC_CONF",
        "backend:cudaMallocAsync",
        "stream-ordered allocation, for ranks that run under PyTorch",
    ));
    let mut out = String::from(
        "# Hints for NCCL and PyTorch. Source this file before the launcher: . ./env.sh\n\
         # Variables that are already set keep their values.\n",
    );
    for (name, value, why) in lines {
        let _ = writeln!(out, "\n# {why}\nexport {name}=\"${{{name}-{value}}}\"");
    }
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::process::Command;

    use super::*;

    fn run_shell(set: &[(&str, &str)]) -> String {
        let script = render_env(LibraryRequirements { uses_all_to_all: true, deterministic: true })
            + "\necho \"$NCCL_MIN_NCHANNELS $NCCL_MIN_NRINGS $NCCL_NVLS_ENABLE [$PYTORCH_CUDA_ALLOC_CONF]\"";
        let mut sh = Command::new("sh");
        sh.arg("-c").arg(script).env_clear();
        for (name, value) in set {
            sh.env(name, value);
        }
        String::from_utf8(sh.output().unwrap().stdout).unwrap()
    }

    #[test]
    fn user_settings_are_kept() {
        assert_eq!(run_shell(&[]), "2 2 0 [backend:cudaMallocAsync]\n");
        let own = [("NCCL_MIN_NCHANNELS", "16"), ("PYTORCH_CUDA_ALLOC_CONF", "")];
        assert_eq!(run_shell(&own), "16 2 0 []\n", "an empty value is a value");
    }

    #[test]
    fn unneeded_hints_are_omitted() {
        let text = render_env(LibraryRequirements::default());
        assert!(!text.contains("NCCL_"), "{text}");
    }
}
