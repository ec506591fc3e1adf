//! Keys of earlier profile files and the keys that replaced them, for the hints of diagnostics.

/// Tables of a profile or of a device family, as pairs of the earlier and the present name.
pub(crate) const RENAMED_TABLES: &[(&str, &str)] =
    &[("habits", "executor"), ("products", "gemms"), ("experts", "grouped_gemm")];
/// Keys of `[executor]`, as pairs of the earlier and the present key.
pub(crate) const RENAMED_TRAITS: &[(&str, &str)] = &[
    ("fuses_passes", "fuses_elementwise"),
    ("joins_products", "merges_gemms"),
    ("bias_in_product", "fuses_bias"),
    ("act_in_product", "fuses_activation"),
    ("packs_exchanges", "packs_all_to_all"),
    ("pass_share", "elementwise_share"),
    ("sustained", "sustained_share"),
];
/// Keys of a table of `[gemms]`, as pairs of the earlier and the present key.
pub(crate) const RENAMED_GEMM: &[(&str, &str)] = &[("most", "max_efficiency")];
/// Keys of `[memory]`, as pairs of the earlier and the present key.
pub(crate) const RENAMED_MEMORY: &[(&str, &str)] = &[("cached_times", "cached_speedup")];
/// Keys of `[overlap]`, as pairs of the earlier and the present key.
pub(crate) const RENAMED_OVERLAP: &[(&str, &str)] = &[
    ("weight_gradient_fused", "fuses_weight_gradient"),
    ("gathers", "overlaps_gathers"),
    ("exchanges", "overlaps_dispatch"),
];
/// Keys of `[library]`, as pairs of the earlier and the present key.
pub(crate) const RENAMED_LIBRARY: &[(&str, &str)] = &[("out_rate", "network_rate")];
/// Keys of a cost line in `[library]`, as pairs of the earlier and the present key.
pub(crate) const RENAMED_LINE: &[(&str, &str)] = &[("own", "self_copy"), ("far", "network_share")];
