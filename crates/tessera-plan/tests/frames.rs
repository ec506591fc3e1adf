//! Phases of pixels over tp: shards of picture rows give the values of whole pictures.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::path::Path;

use tessera_ir::{Builder, DType, Opcode, Program, Type, print};
use tessera_models::{MediaPhases, VideoModel, build_phases};
use tessera_plan::{DecoderPrecision, DtypePolicy, LogicalModel, Mapping, MediaPlacement, Strategy, lower};
use tessera_reference::Tensor;

use crate::run::run_phases;

#[path = "support/run.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod run;
mod support;

/// The phases of two chunks of a scene.
const PHASES: [&str; 6] = ["fill", "decode.open", "decode.rest", "decode.first", "encode", "decode.rest"];

/// The levels of the published VAE.
const FOUR_LEVELS: &str = "dim_mult = [1, 2, 2, 2]\ntemporal_downsample = [false, true, true]\n";

/// A tiny decoder beside the published levels.
const TINY: &str = "kind = \"tiny\"\n[decoder.tiny]\nwidths = [3, 2, 2, 3]\n";

/// Returns the phases of pixels of a model with a tiny VAE and `rows` rows of latents, and one that fills the
/// buffer of latents.
fn pixel_phases(rows: u64) -> LogicalModel {
    phases_of("kind = \"wan_vae\"\n", FOUR_LEVELS, 2, [4, 8, 8], rows)
}

fn phases_of(decoder: &str, levels: &str, base_dim: u64, stride: [u64; 3], rows: u64) -> LogicalModel {
    let config = r#"{"dim":60,"ffn_dim":16,"num_heads":5,"num_layers":1,"in_dim":4,"out_dim":4,"text_len":2,
        "text_dim":2,"freq_dim":4}"#;
    let vae = format!(
        "base_dim = {base_dim}\nz_dim = 4\nres_blocks = 1\n{levels}\
latents_mean = [-0.4, -0.1, 0.2, 0.5]\nlatents_std = [1.5, 1.75, 2.0, 2.25]\n"
    );
    let stream = format!(
        "[video]\nwidth = {}\nheight = {}\n[latent]\nstride = {stride:?}\n[cache]\nmode = \"recompute\"\n\
[decoder]\n{decoder}[decoder.vae]\n{vae}",
        stride[2] * 4,
        stride[1] * rows
    );
    let m = VideoModel::parse(("config.json", config), ("stream.toml", &stream)).unwrap();
    let mut phases = vec![fill_phase(&m)];
    let built = build_phases(&m, MediaPhases::InCalls);
    let is_of_pixels = |p: &Program| PHASES.contains(&p.name.as_str()) || p.name == "decode.exact";
    phases.extend(built.into_iter().filter(is_of_pixels));
    LogicalModel {
        calls: vec![("call".into(), PHASES.map(String::from).to_vec())],
        phases,
        heads: m.wan.heads,
        head_dim: m.wan.head_dim(),
        hidden_size: m.wan.dim,
        ffn_size: m.wan.ffn_dim,
        tokens: m.chunk_tokens(),
        blocks: m.wan.layers,
        experts: 0,
        decoder: DecoderPrecision::Exact,
    }
}

fn fill_phase(m: &VideoModel) -> Program {
    let mut b = Builder::new_logical("fill");
    let ty = Type::new(DType::F32, [m.chunk_tokens(), m.wan.token_width()]);
    b.set_attr("at", "first").set_attr("part", "tokens");
    let x = b.set_label("tokens").add_input("tokens", ty.clone());
    let latent = b.declare_buffer("latent", ty);
    b.set_attr("at", "first");
    b.write_buffer(latent, x);
    b.finish().unwrap()
}

/// Keeps the decode of a later chunk and the encode of an anchor over five uneven shards, which the
/// verifier checks. `TESSERA_BLESS=1` rewrites the file; review the difference.
#[test]
#[allow(clippy::disallowed_methods, reason = "the developer asks for a new file")]
fn the_kept_text_is_what_is_planned() {
    let l = with_base_dim(2, "kind = \"wan_vae\"\n");
    let bundle = lower(&l, &mut mapping(5, Strategy::Ulysses)).unwrap();
    let mut text = String::from(
        "// test: check\n// phases chunk: decode.first encode\n// note: The planner emits these programs for six \
rows of latents over five ranks, of which the first owns two.\n",
    );
    for name in ["decode.first", "encode"] {
        bundle.find_phase(name).unwrap().programs.iter().for_each(|p| text += &print(p));
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../filetests/check/planned_pixels.tir");
    if std::env::var_os("TESSERA_BLESS").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    assert!(std::fs::read_to_string(&path).unwrap_or_default() == text, "{}", path.display());
}

fn mapping(tp: u32, strategy: Strategy) -> Mapping {
    let mesh = format!("tp={tp}").parse().unwrap();
    Mapping { mesh, strategy, media: MediaPlacement::Mesh, ..Mapping::default() }
}

#[test]
fn shards_of_rows_give_the_pixels_and_the_anchor_of_one_rank() {
    compare_shards(&pixel_phases(6));
}

#[test]
fn shards_of_rows_give_the_pixels_of_one_rank_from_a_tiny_decoder() {
    compare_shards(&phases_of(TINY, FOUR_LEVELS, 2, [4, 8, 8], 6));
}

/// Compares the outputs of all phases on one rank and on several, bit by bit.
fn compare_shards(l: &LogicalModel) {
    // Six rows over four ranks are 2, 2, 1 and 1, and over five 2 and four times 1.
    let one = run_phases(l, &mapping(1, Strategy::Ulysses), &PHASES);
    assert!(
        one[3][0]["pixels.first"].data().iter().any(|x| x.abs() > 1e-3 && x.abs() < 1.0),
        "all pixels are clamped"
    );
    for (tp, strategy) in
        [(2, Strategy::Ulysses), (3, Strategy::Megatron), (4, Strategy::Ulysses), (5, Strategy::Ulysses)]
    {
        let shared = run_phases(l, &mapping(tp, strategy), &PHASES);
        for ((phase, one), ranks) in PHASES.iter().zip(&one).zip(&shared) {
            for (rank, outputs) in ranks.iter().enumerate() {
                assert_eq!(outputs, &one[0], "@{phase} of rank {rank} of {tp}");
            }
        }
    }
}

#[test]
fn every_kernel_of_several_rows_exchanges_a_halo_and_none_exchanges_its_history_again() {
    for l in [pixel_phases(6), phases_of(TINY, FOUR_LEVELS, 2, [4, 8, 8], 6)] {
        check_exchanges(&l);
    }
}

fn check_exchanges(l: &LogicalModel) {
    let bundle = lower(l, &mut mapping(3, Strategy::Ulysses)).unwrap();
    for name in &PHASES[1..] {
        let p = &bundle.find_phase(name).unwrap().programs[0];
        let exchanged: Vec<u64> = p
            .ops
            .iter()
            .filter(|o| o.opcode == Opcode::HaloExchange)
            .map(|o| p.type_of(o.operands[0]).shape[0])
            .collect();
        let read =
            p.ops.iter().filter(|o| o.opcode == Opcode::Conv3d && o.keyed.iter().any(|(k, _)| *k == "halo"));
        let own_frames: Vec<u64> = read.map(|o| p.type_of(o.operands[0]).shape[0]).collect();
        assert!(exchanged.len() > 15, "@{name} exchanges {} halos", exchanged.len());
        assert_eq!(exchanged, own_frames, "@{name}");
    }
}

#[test]
fn with_fewer_rows_of_latents_than_ranks_every_rank_computes_whole_frames() {
    let l = pixel_phases(2);
    let bundle = lower(&l, &mut mapping(3, Strategy::Ulysses)).unwrap();
    let all = bundle.phases.iter().flat_map(|p| &p.programs).flat_map(|p| &p.ops);
    assert_eq!(all.filter(|o| o.opcode == Opcode::HaloExchange).count(), 0);
}

/// A VAE whose cells have a multiple of 16 channels at every level.
fn fast_model() -> LogicalModel {
    let mut l = with_base_dim(16, "kind = \"wan_vae\"\nquality = \"fast\"\n");
    l.decoder = DecoderPrecision::Fast;
    l
}

fn with_base_dim(base_dim: u64, decoder: &str) -> LogicalModel {
    phases_of(decoder, "dim_mult = [1, 1]\ntemporal_downsample = [true]\n", base_dim, [2, 2, 2], 6)
}

fn bf16_mapping(tp: u32) -> Mapping {
    Mapping { dtype: DtypePolicy::Bf16, ..mapping(tp, Strategy::Ulysses) }
}

#[test]
fn a_fast_decoder_convolves_in_e4m3_and_encodes_exactly() {
    let bundle = lower(&fast_model(), &mut bf16_mapping(2)).unwrap();
    let in_e4m3 = |name: &str| {
        let p = &bundle.find_phase(name).unwrap().programs[0];
        let convs = p.ops.iter().filter(|o| o.opcode == Opcode::Conv3d);
        let count = convs.filter(|o| p.type_of(o.operands[0]).dtype == DType::E4m3).count();
        let histories = p.buffers.iter().filter(|b| b.ty.dtype == DType::E4m3).count();
        (count, histories)
    };
    // Two blocks in the middle and two per level, with two convolutions each. The one behind the upsampling
    // reads half of the channels, which are no multiple of 16.
    let (count, histories) = in_e4m3("decode.first");
    assert_eq!(count, 11);
    assert_eq!(histories, 3 * count, "a history, the history of its halo, and their view");
    for name in ["decode.exact", "encode"] {
        assert_eq!(in_e4m3(name), (0, 0), "{name}");
    }
    let exact = &bundle.find_phase("decode.exact").unwrap().programs[0];
    let written = exact.ops.iter().filter(|o| o.opcode == Opcode::CacheWrite);
    assert_eq!(written.count(), 0, "the exact decode leaves no history");
}

/// The first frame of a scene, decoded fast and exactly on the reference evaluator.
#[test]
fn a_fast_decoder_is_close_to_the_exact_one_on_any_number_of_ranks() {
    let l = fast_model();
    let phases = ["fill", "decode.exact", "decode.open", "decode.rest"];
    let one = run_phases(&l, &bf16_mapping(1), &phases);
    let (exact, fast) = (&one[1][0]["pixels.exact"], &one[2][0]["pixels.first"]);
    let mean_square = mean_square_error(exact, fast);
    assert!((1e-7..1e-3).contains(&mean_square), "mean square error {mean_square:e} of values in -1..=1");
    let shared = run_phases(&l, &bf16_mapping(3), &phases);
    for ((phase, one), ranks) in phases.iter().zip(&one).zip(&shared) {
        for outputs in ranks {
            assert_eq!(outputs, &one[0], "@{phase}");
        }
    }
}

fn mean_square_error(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.shape(), b.shape());
    let squares = a.data().iter().zip(b.data()).map(|(a, b)| (a - b) * (a - b));
    squares.sum::<f64>() / a.data().len() as f64
}

#[test]
fn a_fast_decoder_needs_gpus_and_a_dtype_that_has_e4m3() {
    let refuse = |mapping: &mut Mapping| lower(&fast_model(), mapping).unwrap_err();
    let leader = refuse(&mut Mapping { media: MediaPlacement::Leader, ..bf16_mapping(1) });
    let f32 = refuse(&mut mapping(1, Strategy::Ulysses));
    for (found, why) in [(leader, "the leader's cores decode"), (f32, "the dtype is f32")] {
        assert_eq!(found[0].code.id, "T0610");
        assert!(found[0].message.contains(why), "{}", found[0].message);
    }
}
