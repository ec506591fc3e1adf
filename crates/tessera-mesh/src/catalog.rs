//! The catalog of built-in clusters. Each entry is a TOML file with a source for every figure.

use tessera_base::{Diagnostic, closest_name};

use crate::Cluster;
pub use crate::codes::T1104;

/// Name and file of every entry, in the order in which they are listed.
const ENTRIES: &[(&str, &str)] = &[
    ("gb200-nvl72", include_str!("../clusters/gb200-nvl72.toml")),
    ("gb300-nvl72", include_str!("../clusters/gb300-nvl72.toml")),
    ("hgx-b200", include_str!("../clusters/hgx-b200.toml")),
    ("hgx-h200", include_str!("../clusters/hgx-h200.toml")),
    ("hgx-h100", include_str!("../clusters/hgx-h100.toml")),
    ("hgx-a100", include_str!("../clusters/hgx-a100.toml")),
    ("laptop", include_str!("../clusters/laptop.toml")),
];

/// Iterates over the names that [`get`] accepts, such as `hgx-h200`, in the order of listings.
pub fn cluster_names() -> impl Iterator<Item = &'static str> {
    ENTRIES.iter().map(|(name, _)| *name)
}

/// Returns the catalog's cluster of this name, with one rack; `None` for an unknown name.
#[must_use]
pub fn get(name: &str) -> Option<Cluster> {
    let (name, text) = ENTRIES.iter().find(|(n, _)| *n == name)?;
    // A test parses every entry, so parsing does not fail here.
    Cluster::parse(name, text).ok()
}

/// Returns a catalog entry, or a diagnostic that lists the names.
///
/// # Errors
/// T1104.
pub fn find_cluster(name: &str) -> Result<Cluster, Box<Diagnostic>> {
    get(name).ok_or_else(|| {
        let mut d = Diagnostic::error(&T1104, format!("unknown cluster `{name}`"))
            .with_hint(format!("clusters: {}", cluster_names().collect::<Vec<_>>().join(", ")));
        if let Some(n) = closest_name(name, cluster_names()) {
            d = d.with_note(format!("closest: `{n}`"));
        }
        Box::new(d)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LinkClass, MemoryTier, Precision};

    #[test]
    fn every_entry_round_trips() {
        for (name, text) in ENTRIES {
            let c = Cluster::parse(name, text).unwrap_or_else(|d| panic!("{name}: {d:?}"));
            assert_eq!(c.name, *name);
            let printed = c.to_toml();
            let again = Cluster::parse(name, &printed).unwrap();
            assert_eq!(c, again, "{name}");
            assert_eq!(printed, again.to_toml(), "{name}");
        }
    }

    #[test]
    fn a_rack_is_one_domain_with_its_cpus() {
        let c = get("gb200-nvl72").unwrap();
        assert_eq!((c.device_count(), c.domain_size, c.domain_count()), (72, 72, 1));
        assert_eq!(c.device_count() / c.devices_per_socket, 36);
        // Two devices that read at the same time share one Grace: 200 GB/s each, which is below
        // both of its limits.
        assert_eq!(c.tier_bytes_per_s(MemoryTier::Host), 200e9);
        assert!(c.tier_bytes_per_s(MemoryTier::Peer) > c.tier_bytes_per_s(MemoryTier::Host));
        assert_eq!(c.clone().with_racks(128).device_count(), 9216);
        assert_eq!(c.with_racks(128).domain_count(), 128);
    }

    #[test]
    fn devices_without_units_for_a_format_have_no_peak() {
        assert_eq!(get("hgx-a100").unwrap().flops_per_s(Precision::Fp8), None);
        assert_eq!(get("hgx-h200").unwrap().flops_per_s(Precision::Fp4), None);
        assert_eq!(get("gb300-nvl72").unwrap().flops_per_s(Precision::Fp4), Some(15e15));
        assert!(
            cluster_names().all(|n| LinkClass::ALL.iter().all(|l| !get(n).unwrap().link_spec(*l).multicast))
        );
    }

    #[test]
    fn contradictions_are_reported_together_and_unknown_keys_by_name() {
        let text = ENTRIES[3].1;
        let changed = |from: &str, to: &str| {
            assert!(text.contains(from), "{from}");
            let ds = Cluster::parse("c.toml", &text.replacen(from, to, 1)).unwrap_err();
            ds.iter().map(|d| (d.code.id, d.message.clone())).collect::<Vec<_>>()
        };
        let one = changed("domain = 8", "domain = 3");
        assert_eq!(one[0].0, "T1101");
        assert_eq!(changed("devices_per_host = 8", "devices_per_host = 90000")[0].0, "T1101");
        assert_eq!(changed("value = 4.8e12", "value = -1.0")[0].0, "T1102");
        assert_eq!(changed("value = 50e9", "value = 500e9")[0].0, "T1103");
        assert_eq!(changed("value = 1.978e15", "value = 1e12")[0].0, "T1103");
        let unknown = changed("measured =", "mesured =");
        assert_eq!(unknown[0].0, "T0002");
        let both = text.replacen("domain = 8", "domain = 3", 1).replacen("value = 4.8e12", "value = 0", 1);
        let ids: Vec<_> = Cluster::parse("c", &both).unwrap_err().iter().map(|d| d.code.id).collect();
        assert_eq!(ids, ["T1101", "T1102"]);
    }

    #[test]
    fn a_misspelt_name_gets_a_suggestion() {
        let d = find_cluster("gb200-nvl27").unwrap_err();
        assert_eq!(d.notes, ["closest: `gb200-nvl72`"]);
    }
}
