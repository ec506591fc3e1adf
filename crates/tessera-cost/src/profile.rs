//! Executor profiles: how much of a device an executor gets out of it. Who runs a model matters as much as where, so
//! the same machine under another profile is another machine.
//!
//! Curves are shares of the device's own figures, so that a profile carries from one device to another; what does not
//! carry stands under the device's family.

mod library;
mod overlap;
mod text;

use std::collections::BTreeMap;

use tessera_base::{Code, Diagnostic, nearest};
use tessera_mesh::Precision;

use crate::habits::Habits;

pub use library::{Library, Line, Lines};
pub use overlap::{Hides, Overlap};

/// No profile of that name.
pub static T1105: Code = Code {
    id: "T1105",
    title: "unknown executor profile",
    page: "A profile says how well an executor uses a machine: `torch-2.11` and `megatron` are PyTorch with NCCL for \
inference and for large-scale training, `tessera` is this project's own backends, `ideal` reaches every peak and is a \
floor, not a forecast. A cluster names the one that fits it best.\n\n\
A profile may also be a TOML file: print the nearest one, edit its curves and give the file's path.",
};
/// A curve out of range.
pub static T1106: Code = Code {
    id: "T1106",
    title: "profile's curve is out of range",
    page: "Shares lie above 0 and at most 1 (the factor of a product, which `most` cuts off, at most 2), halves and times \
are not negative, contention is at least 1. A curve is `share · m/(m+m_half) · n/(n+n_half) · k/(k+k_half)`, cut \
off at `most`; with halves that are not negative it never falls as a product grows, which the search relies on.\n\n\
Each collective needs at least one line, and each table says in `source` where its numbers come from. \
`validated` lists jobs of training, prefill, decode and stream.",
};

/// Jobs that a profile may be validated for: training steps, prompts, decoded tokens, video by the chunk.
pub const JOBS: [&str; 4] = ["training", "prefill", "decode", "stream"];

/// An executor.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    /// Name to ask for it by, such as `torch-2.11`.
    pub name: String,
    /// Name for people.
    pub title: String,
    /// Half-width of the error bar of an estimate made with it, as a share; by what it was compared with.
    pub error: f64,
    /// Jobs that estimates made with it were compared with measurements for, of [`JOBS`].
    pub validated: Vec<String>,
    /// How it runs the ops of a program.
    pub habits: Habits,
    /// Curves on any device.
    pub base: Curves,
    /// Curves on devices of one family, where they differ.
    pub families: BTreeMap<String, Curves>,
}

/// How an executor uses one family of devices.
#[derive(Debug, Clone, PartialEq)]
pub struct Curves {
    /// Matrix products by precision, in the order of [`Precision::ALL`]. A precision that the file leaves out has the
    /// curve of the next wider one that it names.
    pub products: [Product; 4],
    /// Attention.
    pub attention: Attention,
    /// Products of many experts at once.
    pub experts: Experts,
    /// Passes over memory.
    pub memory: Memory,
    /// What the host must do.
    pub host: Host,
    /// Collectives.
    pub library: Library,
    /// What runs beside transfers.
    pub overlap: Overlap,
}

/// Efficiency of `m·k` by `k·n` against the device's peak:
/// `min(most, share · m/(m+m_half) · n/(n+n_half) · k/(k+k_half))`.
#[derive(Debug, Clone, PartialEq)]
pub struct Product {
    /// No product does better.
    pub most: f64,
    /// Factor before the three saturations.
    pub share: f64,
    /// Rows at which half is reached.
    pub m_half: f64,
    /// Output features at which half is reached.
    pub n_half: f64,
    /// Input features at which half is reached.
    pub k_half: f64,
    /// Device time of the smallest product.
    pub start_ns: f64,
    /// Where the numbers come from.
    pub source: String,
}

/// Efficiency of attention against the device's peak:
/// `share · q/(q+queries_half) · k/(k+keys_half)`, with q the queries of all heads.
#[derive(Debug, Clone, PartialEq)]
pub struct Attention {
    /// Of the largest.
    pub share: f64,
    /// Queries, times heads, at which half is reached.
    pub queries_half: f64,
    /// Keys at which half is reached.
    pub keys_half: f64,
    /// Share of the memory's bandwidth while keys and values are read for few queries.
    pub memory_share: f64,
    /// Device time of the smallest.
    pub start_ns: f64,
    /// Whether training writes scores to memory and keeps them for the backward pass, as attention that is not fused does.
    pub stores_scores: bool,
    /// Where the numbers come from.
    pub source: String,
}

/// Products of many experts at once: the product's own `share` and `k_half`, times `share · rows/(rows+rows_half)`.
#[derive(Debug, Clone, PartialEq)]
pub struct Experts {
    /// Of one product of that size.
    pub share: f64,
    /// Rows of one expert at which half is reached.
    pub rows_half: f64,
    /// Share of a plain pass's rate at which weights are read where rows are few.
    pub memory_share: f64,
    /// Device time of the smallest.
    pub start_ns: f64,
    /// Where the numbers come from.
    pub source: String,
}

/// Passes over memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Memory {
    /// Share of the bandwidth that a large pass reaches.
    pub share: f64,
    /// Device time of the smallest pass.
    pub start_ns: f64,
    /// Bytes of a device that the executor and its libraries take for themselves.
    pub reserved_bytes: f64,
    /// Bytes of a pass that caches hold from the kernel before; 0 where they hold none.
    pub cached_bytes: f64,
    /// How many times faster those move; at least 1.
    pub cached_times: f64,
    /// Where the numbers come from.
    pub source: String,
}

/// What the host must do, and what streams do to each other.
#[derive(Debug, Clone, PartialEq)]
pub struct Host {
    /// Host time to launch one kernel.
    pub launch_ns: f64,
    /// Whether launches are recorded once and replayed (CUDA graphs), so that they cost the host nothing.
    pub captured: bool,
    /// How much longer compute takes while a transfer is under way; at least 1.
    pub contention: f64,
    /// Where the numbers come from.
    pub source: String,
}

/// Name and file of every profile.
const ENTRIES: &[(&str, &str)] = &[
    ("torch-2.11", include_str!("../profiles/torch-2.11.toml")),
    ("megatron", include_str!("../profiles/megatron.toml")),
    ("tessera", include_str!("../profiles/tessera.toml")),
    ("ideal", include_str!("../profiles/ideal.toml")),
];

impl Profile {
    /// Names of the profiles that come with the program.
    pub fn names() -> impl Iterator<Item = &'static str> {
        ENTRIES.iter().map(|(name, _)| *name)
    }

    /// A profile that comes with the program.
    #[must_use]
    pub fn named(name: &str) -> Option<Profile> {
        let (name, text) = ENTRIES.iter().find(|(n, _)| *n == name)?;
        // A test reads every entry, so none of them fails here.
        Profile::parse(name, text).ok()
    }

    /// A profile that comes with the program, or a refusal that lists the names.
    ///
    /// # Errors
    /// T1105.
    pub fn find(name: &str) -> Result<Profile, Box<Diagnostic>> {
        Profile::named(name).ok_or_else(|| {
            let mut d = Diagnostic::error(&T1105, format!("no profile is called `{name}`"))
                .hint(format!("profiles: {}", Profile::names().collect::<Vec<_>>().join(", ")));
            if let Some(n) = nearest(name, Profile::names()) {
                d = d.note(format!("closest: `{n}`"));
            }
            Box::new(d)
        })
    }

    /// Whether it was compared with measurements of a job, one of [`JOBS`].
    #[must_use]
    pub fn validates(&self, job: &str) -> bool {
        self.validated.iter().any(|v| v == job)
    }

    /// The curves on a family of devices.
    #[must_use]
    pub fn on(&self, family: &str) -> &Curves {
        self.families.get(family).unwrap_or(&self.base)
    }
}

impl Curves {
    /// The curve of products at a precision.
    #[must_use]
    pub fn product(&self, p: Precision) -> &Product {
        &self.products[p as usize]
    }
}

impl Product {
    /// Share of the peak that a product of `m` rows, `n` output and `k` input features reaches, 0 to 1.
    #[must_use]
    pub fn efficiency(&self, m: f64, n: f64, k: f64) -> f64 {
        let at = |x: f64, half: f64| if x.is_finite() { x / (x + half) } else { 1.0 };
        (self.share * at(m, self.m_half) * at(n, self.n_half) * at(k, self.k_half)).min(self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_reads_prints_and_reads_again() {
        for (name, text) in ENTRIES {
            let p = Profile::parse(name, text).unwrap_or_else(|d| panic!("{name}: {d:?}"));
            assert_eq!(p.name, *name);
            let printed = p.text();
            let again = Profile::parse(name, &printed).unwrap_or_else(|d| panic!("{name}: {d:?}\n{printed}"));
            assert_eq!(p, again, "{name}");
            assert_eq!(printed, again.text(), "{name}");
        }
    }

    #[test]
    fn a_family_changes_what_it_names_and_keeps_the_rest() {
        let p = Profile::named("torch-2.11").unwrap();
        let (base, blackwell) = (p.on("hopper"), p.on("blackwell"));
        assert_eq!(base, &p.base);
        assert_ne!(base.library, blackwell.library);
        assert_ne!(base.product(Precision::Bf16), blackwell.product(Precision::Bf16));
        assert_eq!(base.attention, blackwell.attention);
        assert_eq!(p.on("unheard of"), &p.base);
    }

    #[test]
    fn curves_out_of_range_are_refused_together() {
        let text = ENTRIES[0].1;
        let bad =
            text.replacen("\nshare = ", "\nshare = -", 1).replacen("contention = ", "contention = -", 1);
        let ids: Vec<_> = Profile::parse("p.toml", &bad).unwrap_err().iter().map(|d| d.code.id).collect();
        assert_eq!(ids, ["T1106", "T1106"]);
        let unknown = text.replacen("m_half", "mhalf", 1);
        let ids: Vec<_> = Profile::parse("p.toml", &unknown).unwrap_err().iter().map(|d| d.code.id).collect();
        assert_eq!(ids, ["T0003", "T0002"]);
        let d = Profile::find("torch-2.1").unwrap_err();
        assert_eq!(d.notes, ["closest: `torch-2.11`"]);
    }
}
