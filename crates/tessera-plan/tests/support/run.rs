//! Runs planned programs of small video models on the reference evaluator.

use std::collections::BTreeMap;

use tessera_base::random::{DrawKey, fill_normals};
use tessera_ir::{Opcode, Program, WeightLoad};
use tessera_models::VideoModel;
use tessera_plan::{LogicalModel, Mapping, lower};
use tessera_reference::{CallInputs, CallScalar, Evaluator, Tensor};

use crate::support::logical;

/// Returns a small generator with twelve columns per head and two tokens per frame, so that half of
/// a chunk's six tokens is not a whole number of frames; `extra` appends keys to its stream.
pub fn generator(heads: u64, layers: u64, ffn: u64, extra: &str) -> LogicalModel {
    let config = format!(
        r#"{{"dim":{},"ffn_dim":{ffn},"num_heads":{heads},"num_layers":{layers},"in_dim":4,"out_dim":4,"text_len":3,
        "text_dim":5,"freq_dim":4}}"#,
        heads * 12
    );
    let stream = format!("[video]\nwidth = 32\nheight = 16\n{extra}");
    logical(&VideoModel::parse(("config.json", &config), ("stream.toml", &stream)).unwrap())
}

/// Returns the output `latents` of every rank that has one, after these phases.
pub fn latents(l: &LogicalModel, mapping: &Mapping, phases: &[&str]) -> Vec<Tensor> {
    let outputs = run_phases(l, mapping, phases).pop().unwrap_or_default();
    outputs.into_iter().filter_map(|mut o| o.remove("latents")).collect()
}

/// Returns the outputs of every rank, for each of these phases.
pub fn run_phases(
    l: &LogicalModel,
    mapping: &Mapping,
    phases: &[&str],
) -> Vec<Vec<BTreeMap<String, Tensor>>> {
    let mut mapping = mapping.clone();
    let bundle = lower(l, &mut mapping).unwrap_or_else(|ds| panic!("{ds:#?}"));
    let mut machine = Evaluator::new(mapping.mesh);
    machine.load_weights(random_weights(l));
    let mut outputs = Vec::new();
    for name in phases {
        let phase = bundle.find_phase(name).unwrap();
        let programs: Vec<&Program> =
            mapping.mesh.iter().map(|r| &phase.programs[bundle.role_index(r).unwrap()]).collect();
        outputs.push(machine.run(&programs, &example_call(l)).unwrap_or_else(|f| panic!("@{name}: {f:?}")));
    }
    outputs
}

/// Returns the largest absolute difference of corresponding elements.
pub fn max_difference(a: &Tensor, b: &Tensor) -> f64 {
    a.data().iter().zip(b.data()).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

fn random_weights(l: &LogicalModel) -> BTreeMap<String, Tensor> {
    let mut out = BTreeMap::new();
    for p in &l.phases {
        for op in p.ops.iter().filter(|o| o.opcode == Opcode::Weight) {
            let shape = &p.type_of(op.results[0]).shape;
            // The file stores a patch convolution as [d, C, 1, 2, 2].
            let in_file = match op.weight_load() {
                Some(WeightLoad::Patch) => vec![shape[0], shape[1] / 4, 1, 2, 2],
                // A convolution of all taps as one of so many more channels has the same rows.
                Some(WeightLoad::Conv | WeightLoad::ConvPast) => vec![shape[0], shape[1], 1, 1],
                _ => shape.clone(),
            };
            let seed = out.len() as u64;
            out.entry(op.name.clone().unwrap()).or_insert_with(|| normal_tensor(&in_file, seed));
        }
    }
    out
}

fn normal_tensor(shape: &[u64], seed: u64) -> Tensor {
    let shape: Vec<usize> = shape.iter().map(|n| *n as usize).collect();
    let mut x = vec![0.0f32; shape.iter().product()];
    fill_normals(DrawKey { seed, chunk: 0, draw: 0 }, 0, &mut x);
    Tensor::new(&shape, x.into_iter().map(|x| 0.2 * f64::from(x)).collect())
}

fn example_call(l: &LogicalModel) -> CallInputs {
    let mut call = CallInputs::default().with_float("sigma", 0.7).with_float("bias", -0.5);
    for (p, op) in l.phases.iter().flat_map(|p| p.ops.iter().map(move |o| (p, o))) {
        if op.opcode == Opcode::Input {
            let name = op.name.clone().unwrap();
            call = call.with_input(&name, normal_tensor(&p.type_of(op.results[0]).shape, 99));
        }
    }
    call.scalars.insert("t".into(), CallScalar::Float(Tensor::full(&[3], 640.0)));
    [("seed", 3), ("chunk", 0), ("draw", 0), ("start", 0), ("row", 0)]
        .into_iter()
        .fold(call, |call, (name, x)| call.with_int(name, x))
}
