//! Every page and picture below `docs/`. `cargo xtask library` writes this file.

/// Path and contents of each page.
pub(crate) const PAGES: &[(&str, &str)] = &[
    ("docs/design/0001-dependencies.md", include_str!("../../../docs/design/0001-dependencies.md")),
    ("docs/design/0002-rope-rebase.md", include_str!("../../../docs/design/0002-rope-rebase.md")),
    ("docs/design/0003-cpu-kernels.md", include_str!("../../../docs/design/0003-cpu-kernels.md")),
    ("docs/design/0004-compensated-sums.md", include_str!("../../../docs/design/0004-compensated-sums.md")),
    ("docs/design/0005-matching-ranks.md", include_str!("../../../docs/design/0005-matching-ranks.md")),
    (
        "docs/design/0006-leader-outside-the-mesh.md",
        include_str!("../../../docs/design/0006-leader-outside-the-mesh.md"),
    ),
    (
        "docs/design/0007-weight-fingerprints.md",
        include_str!("../../../docs/design/0007-weight-fingerprints.md"),
    ),
    ("docs/design/0008-cost-model.md", include_str!("../../../docs/design/0008-cost-model.md")),
    (
        "docs/design/0009-gemms-under-a-power-limit.md",
        include_str!("../../../docs/design/0009-gemms-under-a-power-limit.md"),
    ),
    ("docs/design/0010-programs-in-bf16.md", include_str!("../../../docs/design/0010-programs-in-bf16.md")),
    (
        "docs/design/0011-attention-on-hopper.md",
        include_str!("../../../docs/design/0011-attention-on-hopper.md"),
    ),
    ("docs/design/0012-programs-on-gpus.md", include_str!("../../../docs/design/0012-programs-on-gpus.md")),
    ("docs/design/0013-row-chunks.md", include_str!("../../../docs/design/0013-row-chunks.md")),
    ("docs/design/0014-gemms-on-hopper.md", include_str!("../../../docs/design/0014-gemms-on-hopper.md")),
    ("docs/design/0015-vocabulary.md", include_str!("../../../docs/design/0015-vocabulary.md")),
    ("docs/design/0016-structure.md", include_str!("../../../docs/design/0016-structure.md")),
    ("docs/design/0017-noise.md", include_str!("../../../docs/design/0017-noise.md")),
    ("docs/design/0018-captured-programs.md", include_str!("../../../docs/design/0018-captured-programs.md")),
    ("docs/design/0019-stopped-launcher.md", include_str!("../../../docs/design/0019-stopped-launcher.md")),
    ("docs/design/0020-flight-recorder.md", include_str!("../../../docs/design/0020-flight-recorder.md")),
    ("docs/glossary.md", include_str!("../../../docs/glossary.md")),
    ("docs/guides/add-a-backend.md", include_str!("../../../docs/guides/add-a-backend.md")),
    ("docs/guides/add-a-drill.md", include_str!("../../../docs/guides/add-a-drill.md")),
    ("docs/guides/add-a-flag.md", include_str!("../../../docs/guides/add-a-flag.md")),
    ("docs/guides/add-a-gpu-kernel.md", include_str!("../../../docs/guides/add-a-gpu-kernel.md")),
    ("docs/guides/add-a-language-model.md", include_str!("../../../docs/guides/add-a-language-model.md")),
    ("docs/guides/add-a-model.md", include_str!("../../../docs/guides/add-a-model.md")),
    ("docs/guides/add-an-op.md", include_str!("../../../docs/guides/add-an-op.md")),
    ("docs/guides/autopsy.md", include_str!("../../../docs/guides/autopsy.md")),
    ("docs/guides/build-time.md", include_str!("../../../docs/guides/build-time.md")),
    ("docs/guides/captured-regions.md", include_str!("../../../docs/guides/captured-regions.md")),
    ("docs/guides/compile-traces.md", include_str!("../../../docs/guides/compile-traces.md")),
    ("docs/guides/lockstep.md", include_str!("../../../docs/guides/lockstep.md")),
    ("docs/guides/plan-a-rack.md", include_str!("../../../docs/guides/plan-a-rack.md")),
    ("docs/guides/prior-art.md", include_str!("../../../docs/guides/prior-art.md")),
    ("docs/guides/several-groups.md", include_str!("../../../docs/guides/several-groups.md")),
    ("docs/guides/several-hosts.md", include_str!("../../../docs/guides/several-hosts.md")),
    ("docs/guides/torch-flight-recorder.md", include_str!("../../../docs/guides/torch-flight-recorder.md")),
    ("docs/guides/trace-import.md", include_str!("../../../docs/guides/trace-import.md")),
    ("docs/guides/triage-compile.md", include_str!("../../../docs/guides/triage-compile.md")),
    (
        "docs/guides/what-the-verifier-rejects.md",
        include_str!("../../../docs/guides/what-the-verifier-rejects.md"),
    ),
    ("docs/library/README.md", include_str!("../../../docs/library/README.md")),
    ("docs/library/backmap.md", include_str!("../../../docs/library/backmap.md")),
    ("docs/library/symptoms.md", include_str!("../../../docs/library/symptoms.md")),
    ("docs/library/units.md", include_str!("../../../docs/library/units.md")),
    ("docs/manual/README.md", include_str!("../../../docs/manual/README.md")),
    ("docs/manual/compile.md", include_str!("../../../docs/manual/compile.md")),
    ("docs/manual/control-plane.md", include_str!("../../../docs/manual/control-plane.md")),
    ("docs/manual/determinism.md", include_str!("../../../docs/manual/determinism.md")),
    ("docs/manual/groups.md", include_str!("../../../docs/manual/groups.md")),
    ("docs/manual/kv.md", include_str!("../../../docs/manual/kv.md")),
    ("docs/manual/overlap.md", include_str!("../../../docs/manual/overlap.md")),
    ("docs/manual/replay.md", include_str!("../../../docs/manual/replay.md")),
    ("docs/manual/shutdown.md", include_str!("../../../docs/manual/shutdown.md")),
    ("docs/reference/calibration.md", include_str!("../../../docs/reference/calibration.md")),
    ("docs/reference/drills.md", include_str!("../../../docs/reference/drills.md")),
    ("docs/reference/envelope.md", include_str!("../../../docs/reference/envelope.md")),
    ("docs/reference/environment.md", include_str!("../../../docs/reference/environment.md")),
    ("docs/reference/parity.md", include_str!("../../../docs/reference/parity.md")),
    ("docs/reference/tripwires.md", include_str!("../../../docs/reference/tripwires.md")),
];

/// Path and contents of each picture that a page shows.
pub(crate) const PICTURES: &[(&str, &[u8])] = &[
    ("docs/images/autopsy.svg", include_bytes!("../../../docs/images/autopsy.svg")),
    ("docs/images/plan-video.png", include_bytes!("../../../docs/images/plan-video.png")),
    ("docs/images/plan.png", include_bytes!("../../../docs/images/plan.png")),
];

/// The files that list the pages of each prompt pack.
pub(crate) const PACKS: &[(&str, &str)] = &[
    ("docs/library/packs/compile.toml", include_str!("../../../docs/library/packs/compile.toml")),
    ("docs/library/packs/review.toml", include_str!("../../../docs/library/packs/review.toml")),
];
