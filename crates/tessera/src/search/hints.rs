//! An environment file for the ranks of a plan: hints to libraries, each only where the person has set nothing.

use std::fmt::Write;

/// What a plan asks of the libraries below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Needs {
    /// Something travels by all-to-all.
    pub exchanges: bool,
    /// Results must not depend on what ran before.
    pub deterministic: bool,
}

/// The file, for a POSIX shell: `. ./env.sh` before the launcher.
#[must_use]
pub fn hints(needs: Needs) -> String {
    let mut lines: Vec<(&str, &str, &str)> = Vec::new();
    if needs.exchanges {
        let why = "all-to-all: two channels at least";
        lines.push(("NCCL_MIN_NCHANNELS", "2", why));
        lines.push(("NCCL_MIN_NRINGS", "2", "the same for an NCCL that still says rings"));
    }
    if needs.deterministic {
        lines.push(("NCCL_NVLS_ENABLE", "0", "sums by multicast depend on what was allocated before"));
    }
    lines.push((
        "PYTORCH_CUDA_ALLOC_CONF",
        "backend:cudaMallocAsync",
        "allocation in the order of streams, where ranks run under PyTorch",
    ));
    let mut out = String::from(
        "# Hints to the libraries below the ranks. Source it before the launcher: . ./env.sh\n\
         # A variable that is already set keeps its value.\n",
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

    fn shell(set: &[(&str, &str)]) -> String {
        let script = hints(Needs { exchanges: true, deterministic: true })
            + "\necho \"$NCCL_MIN_NCHANNELS $NCCL_MIN_NRINGS $NCCL_NVLS_ENABLE [$PYTORCH_CUDA_ALLOC_CONF]\"";
        let mut sh = Command::new("sh");
        sh.arg("-c").arg(script).env_clear();
        for (name, value) in set {
            sh.env(name, value);
        }
        String::from_utf8(sh.output().unwrap().stdout).unwrap()
    }

    #[test]
    fn what_a_person_has_set_stays() {
        assert_eq!(shell(&[]), "2 2 0 [backend:cudaMallocAsync]\n");
        let own = [("NCCL_MIN_NCHANNELS", "16"), ("PYTORCH_CUDA_ALLOC_CONF", "")];
        assert_eq!(shell(&own), "16 2 0 []\n", "an empty value is a value");
    }

    #[test]
    fn nothing_is_asked_that_the_plan_does_not_need() {
        let text = hints(Needs::default());
        assert!(!text.contains("NCCL"), "{text}");
    }
}
