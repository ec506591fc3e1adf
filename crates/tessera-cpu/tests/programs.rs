//! Programs on one rank: what is refused at load, what a call must bring, which weights are read.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tessera_base::Diagnostic;
use tessera_cpu::{Cpu, Pool};
use tessera_device::{Backend, CallData, Fault, Loaded, Observer, Scalar, Seat, WeightSource};
use tessera_ir::{Slots, Type, parse_all};
use tessera_mesh::{Mesh, Rank};

struct Ones {
    reads: usize,
}

impl WeightSource for Ones {
    fn read(&mut self, _: &str, ty: &Type, load: Option<&str>, _: &Seat) -> Result<Vec<f32>, Diagnostic> {
        self.reads += 1;
        Ok(vec![if load.is_some() { 2.0 } else { 1.0 }; ty.elements() as usize])
    }
}

struct Nobody;

impl Observer for Nobody {
    fn issued(&mut self, _: usize) {}
    fn progress(&mut self, _: u32) {}
}

/// A backend of one rank with the programs of a text loaded, each value in a slot of its own.
fn loaded(text: &str, source: &mut Ones) -> Result<(Cpu, Vec<Loaded>), Diagnostic> {
    let seat = Seat { mesh: Mesh::default(), rank: Rank(0) };
    let mut cpu = Cpu::new(seat, Pool::single(), Vec::new(), Duration::from_secs(1));
    let mut out = Vec::new();
    for p in parse_all(text, "test").unwrap() {
        let bytes = p.values.iter().map(|v| if v.ty.is_token() { 4 } else { v.ty.bytes().0 }).collect();
        let of = (0..p.values.len() as u32).map(Some).collect();
        out.push(cpu.load(&Arc::new(p), &Slots { bytes, of }, source)?);
    }
    Ok((cpu, out))
}

fn call<'a>(x: &'a [f32], b: &[f32]) -> CallData<'a> {
    CallData {
        scalars: BTreeMap::from([("b", Scalar::F32s(b.to_vec()))]),
        inputs: BTreeMap::from([("x", x)]),
    }
}

#[test]
fn a_head_above_the_kernels_is_refused_at_load() {
    let program = |head: usize| {
        format!(
            "program @p {{ %x = input : f32[1, {head}] %s = call : i64 \
             %y = toperator.rope %x, start = %s {{grid = [1, 1, 1], head_dim = {head}}} \
             output \"y\", %y }}"
        )
    };
    assert!(loaded(&program(512), &mut Ones { reads: 0 }).is_ok());
    let d = loaded(&program(514), &mut Ones { reads: 0 }).unwrap_err();
    assert!(d.code.id == "T0801" && d.message.contains("514 elements, above 512"), "{d:?}");
}

#[test]
fn sends_in_one_launch_are_taken_where_none_of_them_waits() {
    let program = |issue: &str, wait: &str| {
        format!(
            "program @p role(r@tp0) mesh(tp=2) {{ %x = input : f32[2] \
             {issue}send %x {{axis = \"tp\", batch = 1, to = 1}} {wait} }}"
        )
    };
    let issued = program("%t = ttile.collective.issue ", "ttile.collective.wait %t");
    assert!(loaded(&issued, &mut Ones { reads: 0 }).is_ok());
    let d = loaded(&program("ttile.collective.", ""), &mut Ones { reads: 0 }).unwrap_err();
    assert!(
        d.code.id == "T0801" && d.message.contains("send in @p") && d.message.contains("one launch"),
        "{d:?}"
    );
}

#[test]
fn a_call_of_other_lengths_is_a_fault_and_outputs_are_of_the_last_run() {
    let text = "program @p { %x = input : f32[2, 2] %b = call : f32[2] output \"y\", %x output \"b\", %b }
                program @q { %x = input : f32[1, 2] output \"z\", %x }";
    let (mut cpu, programs) = loaded(text, &mut Ones { reads: 0 }).unwrap();
    cpu.run(programs[0], &call(&[1.0, 2.0, 3.0, 4.0], &[5.0, 6.0]), &mut Nobody).unwrap();
    assert_eq!(cpu.output("y").unwrap(), [1.0, 2.0, 3.0, 4.0]);
    cpu.run(programs[1], &call(&[7.0, 8.0], &[]), &mut Nobody).unwrap();
    assert_eq!((cpu.output("y"), cpu.output("z").unwrap()), (None, &[7.0, 8.0][..]));
    cpu.run(programs[0], &call(&[4.0; 4], &[5.0, 6.0]), &mut Nobody).unwrap();
    assert_eq!((cpu.output("y").unwrap(), cpu.output("z")), (&[4.0; 4][..], None));
    let mut fault = |x: &[f32], b: &[f32]| match cpu.run(programs[0], &call(x, b), &mut Nobody) {
        Err(Fault::Failed(text)) => text,
        other => panic!("{other:?}"),
    };
    assert_eq!(fault(&[0.0; 3], &[1.0, 2.0]), "T0802: @p reads 4 numbers as `x`, the call brings 3");
    assert_eq!(fault(&[0.0; 4], &[]), "T0802: @p reads 2 numbers as `b`, the call brings 0");
}

#[test]
fn a_weight_of_products_is_read_again_for_another_use() {
    let product =
        "%x = input : f32[2, 2] %w = weight \"w\" : f32[2, 2] %y = toperator.matmul %x, %w output \"y\", %y";
    let sum =
        "%x = input : f32[2, 2] %w = weight \"w\" : f32[2, 2] %y = toperator.add %x, %w output \"y\", %y";
    let other = product.replace("\"w\"", "\"w\" {load = \"patch\"}");
    let text = format!(
        "program @a {{ {product} }} program @b {{ {sum} }} program @c {{ {product} }} program @d {{ {other} }}"
    );
    let mut source = Ones { reads: 0 };
    let (mut cpu, programs) = loaded(&text, &mut source).unwrap();
    assert_eq!(source.reads, 3, "packed, plain, and reordered");
    for (program, want) in programs.into_iter().zip([2.0, 2.0, 2.0, 4.0]) {
        cpu.run(program, &call(&[1.0; 4], &[]), &mut Nobody).unwrap();
        assert_eq!(cpu.output("y").unwrap(), [want; 4]);
    }
}
