//! Runs planned programs of small video models on the reference evaluator.

use std::collections::BTreeMap;

use tessera_base::random::{DrawKey, normals};
use tessera_ir::{Opcode, Program};
use tessera_models::VideoModel;
use tessera_plan::{Logical, Mapping, lower};
use tessera_reference::{Arg, Call, Machine, Tensor};

use crate::support::logical;

/// A small generator of twelve columns a head, two tokens a frame, so that half of a chunk's six are no whole frames; `extra` are more
/// keys of its stream.
pub fn generator(heads: u64, layers: u64, ffn: u64, extra: &str) -> Logical {
    let config = format!(
        r#"{{"dim":{},"ffn_dim":{ffn},"num_heads":{heads},"num_layers":{layers},"in_dim":4,"out_dim":4,"text_len":3,
        "text_dim":5,"freq_dim":4}}"#,
        heads * 12
    );
    let stream = format!("[video]\nwidth = 32\nheight = 16\n{extra}");
    logical(&VideoModel::parse(("config.json", &config), ("stream.toml", &stream)).unwrap())
}

/// The output `latents` of every rank that has one, after these phases.
pub fn latents(l: &Logical, mapping: &Mapping, phases: &[&str]) -> Vec<Tensor> {
    let mut mapping = mapping.clone();
    let bundle = lower(l, &mut mapping).unwrap_or_else(|ds| panic!("{ds:#?}"));
    let mut machine = Machine::new(mapping.mesh);
    machine.load_weights(weights(l));
    let mut outputs = Vec::new();
    for name in phases {
        let phase = bundle.phase(name).unwrap();
        let programs: Vec<&Program> =
            mapping.mesh.iter().map(|r| &phase.programs[bundle.role_of(r).unwrap()]).collect();
        outputs = machine.run(&programs, &call(l)).unwrap_or_else(|f| panic!("@{name}: {f:?}"));
    }
    outputs.into_iter().filter_map(|mut o| o.remove("latents")).collect()
}

/// The largest difference of two elements that stand alike.
pub fn farthest(a: &Tensor, b: &Tensor) -> f64 {
    a.data().iter().zip(b.data()).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

fn weights(l: &Logical) -> BTreeMap<String, Tensor> {
    let mut out = BTreeMap::new();
    for p in &l.phases {
        for op in p.ops.iter().filter(|o| o.opcode == Opcode::Weight) {
            let shape = &p.ty(op.results[0]).shape;
            // A patch convolution lies in the file as [d, C, 1, 2, 2].
            let in_file = match op.str("load") {
                Some("patch") => vec![shape[0], shape[1] / 4, 1, 2, 2],
                _ => shape.clone(),
            };
            let seed = out.len() as u64;
            out.entry(op.name.clone().unwrap()).or_insert_with(|| normal(&in_file, seed));
        }
    }
    out
}

fn normal(shape: &[u64], seed: u64) -> Tensor {
    let shape: Vec<usize> = shape.iter().map(|n| *n as usize).collect();
    let mut x = vec![0.0f32; shape.iter().product()];
    normals(DrawKey { seed, chunk: 0, draw: 0 }, 0, &mut x);
    Tensor::new(&shape, x.into_iter().map(|x| 0.2 * f64::from(x)).collect())
}

fn call(l: &Logical) -> Call {
    let mut call = Call::default().float("sigma", 0.7).float("bias", -0.5);
    for (p, op) in l.phases.iter().flat_map(|p| p.ops.iter().map(move |o| (p, o))) {
        if op.opcode == Opcode::Input {
            let name = op.name.clone().unwrap();
            call = call.input(&name, normal(&p.ty(op.results[0]).shape, 99));
        }
    }
    call.scalars.insert("t".into(), Arg::Float(Tensor::full(&[3], 640.0)));
    [("seed", 3), ("chunk", 0), ("draw", 0), ("start", 0), ("row", 0)]
        .into_iter()
        .fold(call, |call, (name, x)| call.int(name, x))
}
