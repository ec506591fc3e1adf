//! Tests what the demo model shows: the requested colour, shape and direction for every prompt of
//! its vocabulary, still at chunk 200, and the same on one rank as on several.
//!
//! Plans are sealed and run with the decisions, engines and decoder of a stream; ranks are threads.
//! The contents of a clip are measured from its pixels and from models/demo/palette.json alone
//! (clip.rs). Each rank has one thread, because the tests of this file run concurrently.
//!
//! The following command runs every prompt for 200 chunks in both regimes and prints a table (about
//! 20 minutes on two cores):
//!
//! ```text
//! cargo test --release -p tessera local::demo -- --ignored --nocapture
//! ```

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tessera_cpu::kernels::{PixelGeometry, depth_to_space_time, space_time_to_depth};

use super::DeliveredChunk;
use super::clip::{ClipMeasurement, Prompt, World, render_clip};
use crate::{Mapping, Model, Overrides, Plan, Strategy, StreamRequest, Topology, local, plan};

const FRAMES: i64 = 12;
const SEED: u64 = 1;

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo")
}

fn world() -> World {
    World::open(&demo().join("palette.json"))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Regime {
    Resident,
    Recompute,
}

/// Streams on a mesh and passes each chunk to `on`.
fn stream(
    regime: Regime,
    (mesh, strategy): (&str, Strategy),
    requests: impl IntoIterator<Item = StreamRequest>,
    on: impl FnMut(DeliveredChunk<'_>),
) {
    let mapping = Mapping { mesh: mesh.parse().unwrap(), strategy, ..Mapping::default() };
    stream_mapped(regime, &mapping, requests, on);
}

fn stream_mapped(
    regime: Regime,
    mapping: &Mapping,
    requests: impl IntoIterator<Item = StreamRequest>,
    mut on: impl FnMut(DeliveredChunk<'_>),
) {
    let mesh = mapping.mesh;
    let overrides = Overrides { recompute: Some(regime == Regime::Recompute), ..Overrides::default() };
    let model = Model::open(&demo(), &overrides).unwrap_or_else(|ds| panic!("{ds:#?}"));
    let plan: Plan = plan::plan_model(&model.video, &model.name, "", mapping)
        .unwrap_or_else(|ds| panic!("{mesh}: {ds:#?}"));
    local::run(&Arc::new(plan), &model, 1, requests, |chunk| {
        let opens_scene = chunk.chunk == 0 || chunk.meta.resets_caches();
        assert_eq!(
            chunk.meta.recomputes_context(),
            regime == Regime::Recompute && !opens_scene,
            "{regime:?}"
        );
        on(chunk);
    })
    .unwrap_or_else(|ds| panic!("{mesh}: {ds:#?}"));
}

const ONE_RANK: (&str, Strategy) = ("tp=1", Strategy::Ulysses);

fn request(prompt: Option<Prompt>, seed: u64, cut: bool) -> StreamRequest {
    let cut = if cut { crate::SceneCut::Ordered } else { crate::SceneCut::None };
    StreamRequest { prompt: prompt.map(Prompt::text), seed, cut, ..StreamRequest::default() }
}

/// Builds one request per chunk; a request names its prompt only where the prompt changes.
fn requests(asked: &[Prompt], seed: u64) -> Vec<StreamRequest> {
    (0..asked.len())
        .map(|i| request((i == 0 || asked[i] != asked[i - 1]).then_some(asked[i]), seed, false))
        .collect()
}

/// Measures chunks as they arrive, compares each with its prompt and with the previous chunk, and
/// keeps the extremes.
struct ClipChecker<'a> {
    world: &'a World,
    last: Option<(u32, Prompt, ClipMeasurement)>,
    faults: Vec<String>,
    measured: usize,
    psnr: (f64, f64),
    overlap: f64,
    purity: f64,
}

impl ClipChecker<'_> {
    fn new(world: &World) -> ClipChecker<'_> {
        ClipChecker {
            world,
            last: None,
            faults: Vec::new(),
            measured: 0,
            psnr: (f64::INFINITY, 0.0),
            overlap: 1.0,
            purity: 1.0,
        }
    }

    fn check_chunk(&mut self, chunk: &DeliveredChunk<'_>, asked: Prompt) -> ClipMeasurement {
        let seen = self.world.measure(chunk.pixels);
        let mut faults = seen.faults(self.world, asked);
        if chunk.meta.resets_caches() {
            self.last = None;
        }
        if let Some((at, prompt, before)) = self.last {
            // An object keeps its direction to the end of a chunk, whatever the next chunk's prompt
            // is.
            let frames = FRAMES * i64::from(chunk.chunk - at);
            let there = self.world.position_after(before.position, prompt.direction, frames);
            if self.world.max_axis_distance(there, seen.position) > 1 || before.background != seen.background
            {
                faults.push(format!(
                    "the scene jumps: {there:?} on {} becomes {:?} on {}",
                    before.background, seen.position, seen.background
                ));
            }
        }
        if !faults.is_empty() {
            let text = faults.join(", ");
            self.faults.push(format!("chunk {}, {}: {text}", chunk.chunk, asked.text()));
        }
        self.last = Some((chunk.chunk, asked, seen));
        self.measured += 1;
        self.psnr = (self.psnr.0.min(seen.psnr), self.psnr.1 + seen.psnr);
        self.overlap = self.overlap.min(seen.overlap);
        self.purity = self.purity.min(seen.purity);
        seen
    }

    /// Formats the measurements as one line.
    fn summary(&self) -> String {
        format!(
            "{} chunks measured, {} faulty; PSNR mean {:.1} dB, worst {:.1} dB; worst overlap {:.3}, purity {:.3}",
            self.measured,
            self.faults.len(),
            self.psnr.1 / self.measured as f64,
            self.psnr.0,
            self.overlap,
            self.purity
        )
    }

    fn assert_valid(self, name: &str) {
        println!("{name}: {}", self.summary());
        assert!(self.measured > 0 && self.faults.is_empty(), "{name}: {:#?}", self.faults);
    }
}

#[test]
fn measurement_recognises_every_valid_clip_and_rejects_others() {
    let world = world();
    for i in 0..Prompt::COUNT {
        let (prompt, background) = (Prompt::nth(i), i % 8);
        let position = [(i * 37 % 128) as i64, (i * 59 % 128) as i64];
        let mut pixels = render_clip(&world, prompt, background, position);
        let seen = world.measure(&pixels);
        assert_eq!(seen.faults(&world, prompt), [""; 0], "{prompt:?}");
        assert_eq!((seen.position, seen.background), (position, background));
        assert!(seen.psnr > 100.0 && seen.overlap > 0.999 && seen.purity > 0.999, "{seen:?}");
        for other in (0..Prompt::COUNT).filter(|o| *o != i) {
            assert!(!seen.faults(&world, Prompt::nth(other)).is_empty(), "{i} passes as {other}");
        }
        // An object that stops in the second half is not a valid clip.
        let half = pixels.len() / 2;
        let frame = pixels.len() / FRAMES as usize;
        for n in FRAMES as usize / 2..FRAMES as usize {
            pixels.copy_within(half - frame..half, n * frame);
        }
        assert!(!world.measure(&pixels).faults(&world, prompt).is_empty());
    }
}

#[test]
fn resident_shows_every_prompt_at_once_after_200_chunks_and_across_a_rebase() {
    let world = world();
    let mut asked = vec![Prompt::nth(0); 200];
    asked.extend((0..Prompt::COUNT).flat_map(|i| [Prompt::nth(i); 3]));
    asked.extend([Prompt::nth(Prompt::COUNT - 1); 6]);
    let mut watch = ClipChecker::new(&world);
    let mut rebased = Vec::new();
    stream(Regime::Resident, ONE_RANK, requests(&asked, SEED), |chunk| {
        if chunk.meta.phases.iter().any(|p| p.program == "rebase") {
            rebased.push(chunk.chunk);
        }
        if chunk.chunk % 10 == 0 || chunk.chunk >= 199 {
            watch.check_chunk(&chunk, asked[chunk.chunk as usize]);
        }
    });
    assert!(rebased.len() == 1 && (330..asked.len() as u32 - 3).contains(&rebased[0]), "{rebased:?}");
    watch.assert_valid(&format!("resident, every prompt, rebase at {}", rebased[0]));
}

#[test]
fn recompute_shows_every_prompt_at_once() {
    let world = world();
    let mut asked = vec![Prompt::nth(Prompt::COUNT - 1); 24];
    asked.extend((0..Prompt::COUNT).flat_map(|i| [Prompt::nth(i); 3]));
    let mut watch = ClipChecker::new(&world);
    stream(Regime::Recompute, ONE_RANK, requests(&asked, SEED), |chunk| {
        watch.check_chunk(&chunk, asked[chunk.chunk as usize]);
    });
    watch.assert_valid("recompute, every prompt");
}

/// Streams a prompt for 200 chunks and checks a few of them.
fn check_prompt_for_200_chunks(regime: Regime, prompt: Prompt) {
    let world = world();
    let (mut watch, mut at) = (ClipChecker::new(&world), Vec::new());
    stream(regime, ONE_RANK, requests(&[prompt; 200], SEED), |chunk| {
        if [0, 1, 50, 100, 150, 199].contains(&chunk.chunk) {
            at.push(format!("{}: {:.1} dB", chunk.chunk, watch.check_chunk(&chunk, prompt).psnr));
        }
    });
    watch.assert_valid(&format!("{regime:?}, {} ({})", prompt.text(), at.join(", ")));
}

// One prompt per regime, because a stream of 200 chunks takes half a minute. The ignored test below runs all.

#[test]
fn resident_holds_a_prompt_for_200_chunks() {
    check_prompt_for_200_chunks(Regime::Resident, Prompt { color: 0, shape: 2, direction: 2 });
}

#[test]
fn recompute_holds_a_prompt_for_200_chunks() {
    check_prompt_for_200_chunks(Regime::Recompute, Prompt { color: 3, shape: 1, direction: 3 });
}

#[test]
fn a_cut_begins_the_scene_of_its_seed_and_a_seed_alone_does_not() {
    let world = world();
    let prompt = Prompt::nth(17);
    // Each scene has two chunks; the second already has the next scene's seed, which changes
    // nothing without a cut.
    let script: Vec<StreamRequest> = (0..24)
        .map(|c| request((c == 0).then_some(prompt), SEED + u64::div_ceil(c, 2), c > 0 && c % 2 == 0))
        .collect();
    let stream_script = || {
        let (mut watch, mut scenes, mut clips) = (ClipChecker::new(&world), Vec::new(), Vec::new());
        stream(Regime::Resident, ONE_RANK, script.clone(), |chunk| {
            let seen = watch.check_chunk(&chunk, prompt);
            if chunk.chunk % 2 == 0 {
                scenes.push((seen.position, seen.background));
            }
            clips.push(chunk.latents.data().to_vec());
        });
        watch.assert_valid("cuts");
        (scenes, clips)
    };
    let (scenes, clips) = stream_script();
    let distinct = |mut keys: Vec<i64>| {
        keys.sort_unstable();
        keys.dedup();
        keys.len()
    };
    let positions = distinct(scenes.iter().map(|(p, _)| p[0] * 1000 + p[1]).collect());
    let backgrounds = distinct(scenes.iter().map(|(_, b)| *b as i64).collect());
    println!("{} scenes: {positions} positions, {backgrounds} backgrounds", scenes.len());
    assert!(positions >= 6 && backgrounds >= 4, "{scenes:?}");
    assert!(stream_script().1 == clips, "the same seeds gave another clip");

    // The seed at the start of a stream has the same effect as the seed of a cut.
    let begin = |seed| {
        let mut seen = None;
        stream(Regime::Resident, ONE_RANK, [request(Some(prompt), seed, false)], |chunk| {
            let s = world.measure(chunk.pixels);
            seen = Some((s.position, s.background));
        });
        seen.unwrap()
    };
    assert_eq!(begin(SEED), scenes[0]);
    assert!((2..6).any(|seed| begin(seed) != scenes[0]));
}

/// Returns latents and pixels of nine chunks with a new prompt at chunk 3 and a cut at chunk 6.
fn stream_clip(regime: Regime, (mesh, strategy): (&str, Strategy)) -> (Vec<Vec<u8>>, Vec<Vec<f32>>) {
    stream_clip_mapped(regime, &Mapping { mesh: mesh.parse().unwrap(), strategy, ..Mapping::default() })
}

fn stream_clip_mapped(regime: Regime, mapping: &Mapping) -> (Vec<Vec<u8>>, Vec<Vec<f32>>) {
    let script = (0..9).map(|c| match c {
        0 => request(Some(Prompt::nth(5)), SEED, false),
        3 => request(Some(Prompt::nth(42)), SEED, false),
        _ => request(None, SEED + u64::from(c >= 6), c == 6),
    });
    let (mut latents, mut pixels) = (Vec::new(), Vec::new());
    stream_mapped(regime, mapping, script, |chunk| {
        latents.push(chunk.latents.data().to_vec());
        pixels.push(chunk.pixels.to_vec());
    });
    assert_eq!(latents.len(), 9);
    (latents, pixels)
}

#[test]
fn several_ranks_stream_the_same_clip_as_one() {
    for regime in [Regime::Resident, Regime::Recompute] {
        let (latents, pixels) = stream_clip(regime, ONE_RANK);
        for mesh in ["tp=2", "pp=2"] {
            let several = stream_clip(regime, (mesh, Strategy::Ulysses)).0;
            let differs = several.iter().zip(&latents).position(|(a, b)| a != b);
            assert_eq!(differs, None, "{regime:?} {mesh}: first chunk whose latents differ");
        }
        let several = stream_clip(regime, ("tp=2", Strategy::Megatron)).1;
        let error = several
            .iter()
            .flatten()
            .zip(pixels.iter().flatten())
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        println!("{regime:?} tp=2 megatron: max abs pixel error {error:e}");
        assert!(error < 0.01, "{regime:?}: pixels differ by up to {error:e}");
    }
}

#[test]
fn a_leader_outside_the_mesh_streams_the_same_clip() {
    for regime in [Regime::Resident, Regime::Recompute] {
        for (topology, mesh, strategy) in [
            (Topology::Pp0, "tp=1", Strategy::Ulysses),
            (Topology::Pp1, "tp=2", Strategy::Ulysses),
            (Topology::Pp1, "tp=2", Strategy::Megatron),
            (Topology::Pp1, "pp=2", Strategy::Ulysses),
        ] {
            let mapping = Mapping { topology, mesh: mesh.parse().unwrap(), strategy, ..Mapping::default() };
            let within = stream_clip(regime, (mesh, strategy));
            assert!(
                stream_clip_mapped(regime, &mapping) == within,
                "{regime:?} {topology:?} {mesh} {strategy:?}"
            );
        }
    }
}

#[test]
fn chunked_rows_stream_the_same_clip() {
    for regime in [Regime::Resident, Regime::Recompute] {
        for mesh in ["tp=2", "tp=4"] {
            let strategy = Strategy::Megatron;
            let whole = stream_clip(regime, (mesh, strategy));
            let mapping =
                Mapping { mesh: mesh.parse().unwrap(), strategy, overlap_chunks: 2, ..Mapping::default() };
            assert!(stream_clip_mapped(regime, &mapping) == whole, "{regime:?} {mesh}");
        }
    }
}

/// Geometry of a chunk of the demo model, for decoding the chunk as a whole.
const CHUNK_GEOMETRY: PixelGeometry = PixelGeometry { frames: 3, height: 16, width: 16, stride: [4, 8, 8] };

// proves: V-06
#[test]
fn the_anchor_first_decode_is_the_decode_of_whole_chunks() {
    let mut before: Option<(Vec<f32>, bool)> = None;
    let mut anchored = 0;
    let script = (0..9).map(|c| request((c == 0).then_some(Prompt::nth(5)), SEED, c == 5));
    let overrides = Overrides { recompute: Some(true), ..Overrides::default() };
    let model = Model::open(&demo(), &overrides).unwrap_or_else(|ds| panic!("{ds:#?}"));
    let plan = plan::plan_model(&model.video, &model.name, "", &Mapping::default()).unwrap();
    local::run(&Arc::new(plan), &model, 1, script, |chunk| {
        let latents = chunk.latents.to_f32().unwrap();
        let mut whole = vec![0.0; latents.len()];
        depth_to_space_time(&mut whole, &latents, CHUNK_GEOMETRY);
        assert!(chunk.pixels == whole, "chunk {}", chunk.chunk);
        let opens_scene = chunk.meta.resets_caches() || chunk.chunk == 0;
        if let (Some((previous, opened)), Some(context)) = (&before, chunk.context) {
            let mut expected = previous.clone();
            if !opened {
                // The anchor encodes the last pixel frame of latent 0, repeated.
                let mut pixels = vec![0.0; previous.len()];
                depth_to_space_time(&mut pixels, previous, CHUNK_GEOMETRY);
                let frame = pixels.len() / FRAMES as usize;
                let anchor = pixels[3 * frame..4 * frame].repeat(4);
                let first = previous.len() / 3;
                space_time_to_depth(
                    &mut expected[..first],
                    &anchor,
                    PixelGeometry { frames: 1, ..CHUNK_GEOMETRY },
                );
                anchored += 1;
            }
            assert!(context.to_f32().unwrap() == expected, "context of chunk {}", chunk.chunk);
        }
        assert_eq!(chunk.context.is_some(), !opens_scene);
        before = Some((latents, opens_scene));
    })
    .unwrap_or_else(|ds| panic!("{ds:#?}"));
    assert_eq!(anchored, 5, "chunks 2 to 4 and 7 to 8");
}

#[test]
#[ignore = "about 20 minutes; see the head of this file"]
fn every_prompt_holds_for_200_chunks() {
    let world = world();
    println!("| cache | prompt | faulty chunks | PSNR at 0, 1, 50, 199 | worst | overlap |");
    println!("| --- | --- | --- | --- | --- | --- |");
    let row = |regime: Regime, prompt: Prompt| {
        let mut watch = ClipChecker::new(&world);
        let mut at = Vec::new();
        stream(regime, ONE_RANK, requests(&[prompt; 200], SEED + prompt.color as u64), |chunk| {
            let seen = watch.check_chunk(&chunk, prompt);
            if [0, 1, 50, 199].contains(&chunk.chunk) {
                at.push(format!("{:.1}", seen.psnr));
            }
        });
        let faulty = watch.faults.len();
        println!(
            "| {regime:?} | {} | {faulty} | {} dB | {:.1} dB | {:.3} |",
            prompt.text(),
            at.join(", "),
            watch.psnr.0,
            watch.overlap
        );
        watch.faults
    };
    let faults: Vec<String> = std::thread::scope(|scope| {
        let regimes = [Regime::Resident, Regime::Recompute].map(|regime| {
            let row = &row;
            scope.spawn(move || {
                (0..Prompt::COUNT).flat_map(|i| row(regime, Prompt::nth(i))).collect::<Vec<_>>()
            })
        });
        regimes.into_iter().flat_map(|r| r.join().unwrap()).collect()
    });
    assert!(faults.is_empty(), "{faults:#?}");
}
