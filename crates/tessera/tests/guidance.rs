//! Compares guided forwards with the two predictions from which they are made.
//!
//! The flows under each of the two prompts come from diffusers (fixtures/README.md), which runs them one
//! after the other, with keys and values of their own. Here they are combined in f64.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use support::cases::run_cases;
use support::{
    TOLERANCE, assert_seals_under_every_policy, fixture, guided_text_step, max_error, open_tensors,
    plan_mesh, text_step, tokens,
};
use tessera::{Model, Overrides, Plan};
use tessera_ir::{Program, op_workload};
use tessera_mesh::Rank;
use tessera_plan::{Numerics, Strategy};
use tessera_weights::WeightSet;

const SCALE: f64 = 3.5;

type Flows = Vec<(String, Vec<f32>)>;

/// A fixture in one regime, with its flows under a prompt and under a negative one.
struct GuidedFixture {
    name: &'static str,
    recompute: bool,
    positive: WeightSet,
    negative: WeightSet,
}

impl GuidedFixture {
    fn open_all() -> Vec<GuidedFixture> {
        let open = |name, recompute| GuidedFixture {
            name,
            recompute,
            positive: open_tensors(&format!("{name}/expected.safetensors")),
            negative: open_tensors(&format!("{name}/expected_negative.safetensors")),
        };
        let both = |name| [open(name, false), open(name, true)];
        ["wan-odd", "wan-even"].into_iter().flat_map(both).collect()
    }

    fn model(&self, scale: Option<f64>) -> Model {
        let overrides =
            Overrides { recompute: Some(self.recompute), guidance: scale, ..Overrides::default() };
        let mut m = Model::open(&fixture(self.name), &overrides).unwrap_or_else(|d| panic!("{d:#?}"));
        m.video.stream.bias = if self.recompute { 0.3 } else { 1.0 };
        m
    }

    /// Returns the flows under the prompt, guided by the rows of another prompt.
    fn guided(&self, m: &Model, p: &Plan, negative: &WeightSet) -> Flows {
        let text = guided_text_step(m, (&self.positive, "full.text"), (negative, "full.text"));
        run_cases(m, &self.positive, self.recompute, p, text)
    }

    /// Returns the flows under one prompt alone.
    fn plain(&self, prompt: &WeightSet) -> Flows {
        let m = self.model(None);
        let text = text_step(&m, prompt, "full.text");
        run_cases(&m, &self.positive, self.recompute, &one_rank(&m), text)
    }
}

fn one_rank(m: &Model) -> Plan {
    plan_mesh(m, "tp=1", Strategy::Ulysses, Numerics::Standard)
}

fn combine(positive: &[f32], negative: &[f32]) -> Vec<f32> {
    let pairs = positive.iter().zip(negative).map(|(p, n)| (f64::from(*p), f64::from(*n)));
    pairs.map(|(p, n)| (n + SCALE * (p - n)) as f32).collect()
}

/// The largest error of a combination of two flows that are within the tolerance of other fixtures.
fn tolerance() -> f32 {
    (2.0 * SCALE - 1.0) as f32 * TOLERANCE
}

#[test]
fn guided_flows_are_the_combination_of_both_references() {
    for f in GuidedFixture::open_all() {
        let m = f.model(Some(SCALE));
        let found = f.guided(&m, &one_rank(&m), &f.negative);
        assert!(found.len() >= 6, "{}: {} cases", f.name, found.len());
        for (case, flow) in found {
            let of = |set| tokens(set, &format!("{case}.flow"));
            let (positive, negative) = (of(&f.positive), of(&f.negative));
            let error = max_error(&flow, &combine(&positive, &negative));
            assert!(error <= tolerance(), "{} {case}: max abs error {error:e}", f.name);
            // Without the second pass, or with its cache, the result is another one.
            for one in [&positive, &negative] {
                assert!(max_error(&flow, one) > 100.0 * tolerance(), "{} {case}", f.name);
            }
        }
    }
}

#[test]
fn guided_flows_are_the_combination_of_two_streams_of_their_own() {
    for f in GuidedFixture::open_all() {
        let m = f.model(Some(SCALE));
        let guided = f.guided(&m, &one_rank(&m), &f.negative);
        let (positive, negative) = (f.plain(&f.positive), f.plain(&f.negative));
        for ((case, flow), ((_, p), (_, n))) in guided.iter().zip(positive.iter().zip(&negative)) {
            // A flow is read back from x0, which rounds it.
            let error = max_error(flow, &combine(p, n));
            assert!(error <= 1e-5, "{} {case}: max abs error {error:e}", f.name);
        }
    }
}

#[test]
fn a_scale_of_one_or_two_equal_prompts_give_the_bits_of_a_stream_without_guidance() {
    for f in GuidedFixture::open_all() {
        let plain = f.plain(&f.positive);
        let m = f.model(Some(1.0));
        assert_eq!(f.guided(&m, &one_rank(&m), &f.negative), plain, "{} with a scale of 1", f.name);
        let m = f.model(Some(SCALE));
        assert_eq!(f.guided(&m, &one_rank(&m), &f.positive), plain, "{} with equal prompts", f.name);
    }
}

#[test]
fn guided_flows_have_the_same_bits_on_every_mesh() {
    for f in GuidedFixture::open_all() {
        let m = f.model(Some(SCALE));
        let one = f.guided(&m, &one_rank(&m), &f.negative);
        let meshes: &[&str] = match f.name {
            "wan-odd" => &["tp=2", "tp=5", "pp=2", "tp=2,pp=2"],
            _ => &["tp=4", "pp=3", "tp=3,pp=2"],
        };
        for mesh in meshes {
            let p = plan_mesh(&m, mesh, Strategy::Ulysses, Numerics::Standard);
            assert_eq!(f.guided(&m, &p, &f.negative), one, "{} {mesh}", f.name);
        }
        let plan = |mesh, strategy| plan_mesh(&m, mesh, strategy, Numerics::MeshInvariant);
        if f.name == "wan-even" {
            let one = f.guided(&m, &plan("tp=1", Strategy::Megatron), &f.negative);
            for (mesh, strategy) in
                [("tp=2", Strategy::Megatron), ("tp=2,pp=2", Strategy::Megatron), ("tp=2", Strategy::Ulysses)]
            {
                assert_eq!(f.guided(&m, &plan(mesh, strategy), &f.negative), one, "{mesh}");
            }
        }
    }
}

#[test]
fn megatron_agrees_within_rounding() {
    for f in GuidedFixture::open_all() {
        let m = f.model(Some(SCALE));
        let plan = |mesh| plan_mesh(&m, mesh, Strategy::Megatron, Numerics::Standard);
        let one = f.guided(&m, &plan("tp=1"), &f.negative);
        for mesh in ["tp=2", "tp=2,pp=2"] {
            for ((case, a), (_, b)) in f.guided(&m, &plan(mesh), &f.negative).iter().zip(&one) {
                let error = max_error(a, b);
                assert!(error <= tolerance(), "{} {mesh} {case}: {error:e}", f.name);
            }
        }
    }
}

#[test]
fn a_plan_with_guidance_has_twice_the_caches_and_the_forwards_and_the_same_weights() {
    for f in GuidedFixture::open_all() {
        let (plain, guided) = (one_rank(&f.model(None)), one_rank(&f.model(Some(SCALE))));
        let memory = |p: &Plan| p.sealed.rank_memory(Rank(0)).unwrap();
        let step = |p: &Plan| (**p.sealed.rank_program("denoise.fill3", Rank(0)).unwrap()).clone();
        let is_cache = |name: &str| name.starts_with("kv.") || name.starts_with("cross.");
        let caches = |p: &Program| -> u64 {
            p.buffers.iter().filter(|b| is_cache(&b.name)).map(|b| b.ty.byte_size().0).sum()
        };
        let (one, two) = (step(&plain), step(&guided));
        assert_eq!(caches(&two), 2 * caches(&one), "{}", f.name);
        assert_eq!(memory(&guided).buffers.0, memory(&plain).buffers.0 + caches(&one), "{}", f.name);
        assert_eq!(memory(&guided).weights, memory(&plain).weights, "{}", f.name);
        // What lives through both passes: the input of the blocks, modulations, and two predictions.
        assert!(memory(&guided).temporaries.0 < 2 * memory(&plain).temporaries.0, "{}", f.name);
        let flops = |p: &Program| -> u64 { p.ops.iter().map(|op| op_workload(p, op).flops.0).sum() };
        let factor = flops(&two) as f64 / flops(&one) as f64;
        assert!((1.9..=2.0).contains(&factor), "{}: {factor}", f.name);
        assert_ne!(plain.sealed.digest(), guided.sealed.digest());
        let other = one_rank(&f.model(Some(SCALE + 1.0)));
        assert_ne!(guided.sealed.digest(), other.sealed.digest(), "the scale is part of the seal");
    }
}

#[test]
fn guidance_seals_under_every_policy_with_a_sink_and_a_recache() {
    for recompute in [false, true] {
        let overrides =
            Overrides { recompute: Some(recompute), guidance: Some(SCALE), ..Overrides::default() };
        let mut m = Model::open(&fixture("wan-even"), &overrides).unwrap();
        if !recompute {
            let s = &mut m.video.stream;
            (s.window_frames, s.sink_frames, s.recache) = (12, 3, true);
        }
        assert_seals_under_every_policy(&m);
    }
}
