//! Chooses the implementation of an op from the capabilities of a GPU and the shape of the op. The
//! choice is a pure function, so that `tessera doctor` prints what a run would do, and a run on a
//! Hopper GPU can take the path of other GPUs.

use tessera_ir::DType;

use crate::attention_cudnn::AttentionShape;
use crate::attention_sm90::AttentionSm90;
use crate::capabilities::{ATTENTION_FAMILY, Capabilities, FeatureMask, GEMM_FAMILY, KernelFamily};
use crate::devices::Gpu;
use crate::gemm::shape::{GemmShape, VIDEO_GEMM, is_worth_tuning};
use crate::gemm::sm90::GemmSm90;

/// Largest head of attention over pages with a block per KV head.
const MAX_KV_HEAD: u64 = 512;

/// How a GEMM is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GemmRoute {
    /// The sm90 kernel, because its epilogue differs from cuBLASLt's in the last bits and a rank with
    /// fewer rows must compute the same bits.
    Sm90,
    /// The faster of the sm90 kernel and cuBLASLt, if their bits are equal.
    Tuned,
    CublasLt,
    /// No implementation: the GPU has no instructions for the dtype.
    Unsupported,
}

/// Chooses how a GEMM is computed. A GEMM of few rows in f32 never gets here.
pub(crate) fn choose_gemm(c: &Capabilities, s: &GemmShape) -> GemmRoute {
    if s.dtype == DType::E4m3 && c.compute < (8, 9) {
        return GemmRoute::Unsupported;
    }
    if !c.supports(&GEMM_FAMILY) || !GemmSm90::is_supported(s) {
        return GemmRoute::CublasLt;
    }
    match (s.gelu || s.residual, is_worth_tuning(s)) {
        (true, _) => GemmRoute::Sm90,
        (false, true) => GemmRoute::Tuned,
        (false, false) => GemmRoute::CublasLt,
    }
}

/// How one range of keys of an attention is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttentionRoute {
    Sm90,
    Cudnn,
    /// The kernel of one warp per query, for shapes that no specialised kernel supports.
    Plain,
}

/// Chooses how attention of a dtype is computed. If any range of keys is [`AttentionRoute::Plain`],
/// all of the attention is.
pub(crate) fn choose_attention(c: &Capabilities, dtype: DType, s: &AttentionShape) -> AttentionRoute {
    if uses_plain_attention(dtype, s) {
        AttentionRoute::Plain
    } else if c.supports(&ATTENTION_FAMILY) && AttentionSm90::is_supported(s) {
        AttentionRoute::Sm90
    } else {
        AttentionRoute::Cudnn
    }
}

/// Names the implementation of an attention: one for each range of keys, in their order.
pub(crate) fn describe_attention(c: &Capabilities, dtype: DType, ranges: &[AttentionShape]) -> String {
    let routes: Vec<AttentionRoute> = ranges.iter().map(|s| choose_attention(c, dtype, s)).collect();
    if routes.contains(&AttentionRoute::Plain) {
        return "plain".to_string();
    }
    let name = |route: &AttentionRoute| if *route == AttentionRoute::Sm90 { "sm90" } else { "cuDNN" };
    routes.iter().map(name).collect::<Vec<_>>().join(" + ")
}

/// Returns whether no specialised kernel of any GPU computes an attention.
pub(crate) fn uses_plain_attention(dtype: DType, s: &AttentionShape) -> bool {
    dtype != DType::Bf16 || !s.is_supported_by_cudnn()
}

/// How attention over caches in pages is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PagedRoute {
    /// A block for some queries of one KV head, whose keys and values are apart.
    KvHead,
    /// A block for many queries that read the same rows. It reads a row once as key and as value.
    Latent,
}

/// Chooses how attention over pages is computed: by whether a row is key and value, and by the size of a head, of
/// which the kernel for one KV head keeps whole queries in static shared memory.
pub(crate) fn choose_paged_attention(head_dim: u64, values_are_keys: bool) -> PagedRoute {
    if values_are_keys || head_dim > MAX_KV_HEAD { PagedRoute::Latent } else { PagedRoute::KvHead }
}

/// Describes which implementation computes each kind of op on a GPU, as names and sentences.
#[must_use]
pub fn describe_kernels(gpu: &Gpu, mask: &FeatureMask) -> Vec<(&'static str, String)> {
    let c =
        Capabilities { compute: gpu.capability, multiprocessors: gpu.multiprocessors, mask: mask.clone() };
    let gemm = VIDEO_GEMM;
    let attention =
        AttentionShape { queries: 4680, keys: 4680, heads: 40, head_size: 128, stores_lse: false };
    let because = |text: &str, family: &KernelFamily| match c.refusal(family) {
        Some(why) => format!("{text}, because {why}"),
        None => text.to_string(),
    };
    let gemm_text = |s: GemmShape| match choose_gemm(&c, &s) {
        GemmRoute::Sm90 => "the sm90 kernel".to_string(),
        GemmRoute::Tuned => "the sm90 kernel or cuBLASLt, whichever is faster for the shape".to_string(),
        GemmRoute::CublasLt if s.dtype == DType::Bf16 => because("cuBLASLt", &GEMM_FAMILY),
        GemmRoute::CublasLt if s.dtype == DType::E4m3 => "cuBLASLt, if it scales each row on this GPU".into(),
        GemmRoute::CublasLt => "cuBLASLt; a plain kernel for 8 rows or fewer".to_string(),
        GemmRoute::Unsupported => {
            let (major, minor) = c.compute;
            format!(
                "not supported, because sm_{major}{minor} has no e4m3 instructions (sm_89 and later have)"
            )
        }
    };
    let attention_text = |dtype, s: AttentionShape| match choose_attention(&c, dtype, &s) {
        AttentionRoute::Sm90 => "the sm90 kernel".to_string(),
        AttentionRoute::Cudnn if AttentionSm90::is_supported(&s) => because("cuDNN", &ATTENTION_FAMILY),
        AttentionRoute::Cudnn => "cuDNN".to_string(),
        AttentionRoute::Plain => "a plain kernel".to_string(),
    };
    vec![
        ("GEMMs in bf16", gemm_text(gemm)),
        ("GEMMs in bf16 with GELU or residual", gemm_text(GemmShape { residual: true, ..gemm })),
        ("GEMMs in e4m3", gemm_text(GemmShape { dtype: DType::E4m3, ..gemm })),
        ("GEMMs in f32", gemm_text(GemmShape { dtype: DType::F32, ..gemm })),
        ("attention in bf16, heads of 128", attention_text(DType::Bf16, attention)),
        (
            "attention in bf16, smaller heads",
            attention_text(DType::Bf16, AttentionShape { head_size: 64, ..attention }),
        ),
        ("attention in f32", attention_text(DType::F32, attention)),
        ("all other ops", format!("kernels that NVRTC compiles for {}", c.architecture())),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    const ATTENTION: AttentionShape =
        AttentionShape { queries: 300, keys: 185, heads: 2, head_size: 128, stores_lse: false };

    fn capabilities(compute: (u32, u32), mask: &str) -> Capabilities {
        Capabilities { compute, multiprocessors: 132, mask: mask.parse().unwrap() }
    }

    #[test]
    fn rows_that_are_keys_and_values_are_read_once() {
        assert_eq!(choose_paged_attention(128, false), PagedRoute::KvHead);
        for (head_dim, values_are_keys) in [(576, true), (12, true), (576, false)] {
            assert_eq!(choose_paged_attention(head_dim, values_are_keys), PagedRoute::Latent);
        }
    }

    #[test]
    fn only_unmasked_hopper_gpus_use_the_sm90_kernels() {
        let gelu = GemmShape { gelu: true, ..VIDEO_GEMM };
        for (compute, mask, plain, with_gelu, attention) in [
            ((8, 0), "", GemmRoute::CublasLt, GemmRoute::CublasLt, AttentionRoute::Cudnn),
            ((9, 0), "", GemmRoute::Tuned, GemmRoute::Sm90, AttentionRoute::Sm90),
            ((9, 0), "hopper", GemmRoute::CublasLt, GemmRoute::CublasLt, AttentionRoute::Cudnn),
            ((10, 0), "", GemmRoute::CublasLt, GemmRoute::CublasLt, AttentionRoute::Cudnn),
        ] {
            let c = capabilities(compute, mask);
            let found = (choose_gemm(&c, &VIDEO_GEMM), choose_gemm(&c, &gelu));
            assert_eq!(found, (plain, with_gelu), "{compute:?} {mask}");
            assert_eq!(choose_attention(&c, DType::Bf16, &ATTENTION), attention, "{compute:?} {mask}");
        }
    }

    #[test]
    fn shapes_that_the_sm90_kernels_lack_go_to_the_libraries() {
        let c = capabilities((9, 0), "");
        let gemm = |s| choose_gemm(&c, &s);
        assert_eq!(gemm(GemmShape { out_columns: 5140, gelu: true, ..VIDEO_GEMM }), GemmRoute::CublasLt);
        assert_eq!(gemm(GemmShape { gelu: true, residual: true, ..VIDEO_GEMM }), GemmRoute::CublasLt);
        assert_eq!(gemm(GemmShape { dtype: DType::F32, ..VIDEO_GEMM }), GemmRoute::CublasLt);
        // Tuning does not pay off, but an epilogue decides for any number of rows.
        assert_eq!(gemm(GemmShape { rows: 8, ..VIDEO_GEMM }), GemmRoute::CublasLt);
        assert_eq!(gemm(GemmShape { rows: 8, residual: true, ..VIDEO_GEMM }), GemmRoute::Sm90);
        let attention =
            |dtype, head_size| choose_attention(&c, dtype, &AttentionShape { head_size, ..ATTENTION });
        assert_eq!(attention(DType::Bf16, 64), AttentionRoute::Cudnn);
        assert_eq!(attention(DType::Bf16, 12), AttentionRoute::Plain);
        assert_eq!(attention(DType::F32, 128), AttentionRoute::Plain);
        let narrow = AttentionShape { head_size: 12, ..ATTENTION };
        let smaller = AttentionShape { head_size: 64, ..ATTENTION };
        for (ranges, text) in [
            (&[ATTENTION][..], "sm90"),
            (&[ATTENTION, smaller], "sm90 + cuDNN"),
            (&[ATTENTION, narrow], "plain"),
        ] {
            assert_eq!(describe_attention(&c, DType::Bf16, ranges), text);
        }
    }

    #[test]
    fn e4m3_needs_instructions_that_ampere_lacks() {
        let e4m3 = GemmShape { dtype: DType::E4m3, ..VIDEO_GEMM };
        let route = |compute| choose_gemm(&capabilities(compute, ""), &e4m3);
        assert_eq!([(8, 0), (8, 6)].map(route), [GemmRoute::Unsupported; 2]);
        assert_eq!([(8, 9), (9, 0), (10, 0)].map(route), [GemmRoute::CublasLt; 3]);
    }

    #[test]
    fn the_description_names_the_reason_of_a_fallback() {
        let gpu = |capability| Gpu {
            name: "a GPU".into(),
            uuid: String::new(),
            pci_bus_id: "0000:00:00.0".into(),
            memory: tessera_base::Bytes(1 << 30),
            multiprocessors: 132,
            capability,
            nvlinks: None,
        };
        let text = |capability, mask: &str, row: usize| {
            describe_kernels(&gpu(capability), &mask.parse().unwrap())[row].1.clone()
        };
        assert_eq!(text((9, 0), "", 1), "the sm90 kernel");
        assert_eq!(text((9, 0), "hopper", 0), "cuBLASLt, because hopper is masked");
        assert_eq!(text((8, 0), "", 0), "cuBLASLt, because the sm90 GEMM needs hopper");
        assert!(text((8, 0), "", 2).starts_with("not supported, because sm_80"));
        assert_eq!(text((8, 9), "hopper", 4), "cuDNN, because hopper is masked");
        assert_eq!((text((10, 0), "", 5), text((10, 0), "", 6)), ("cuDNN".into(), "a plain kernel".into()));
        assert!(text((10, 0), "", 7).ends_with("sm_100a") && text((8, 9), "", 7).ends_with("sm_89"));
    }
}
