//! Programs on one rank: rejection at load, checks of a call's inputs, and the weights that are
//! read.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tessera_base::Diagnostic;
use tessera_cpu::{CpuBackend, Pool};
use tessera_device::{Backend, CallData, Fault, MeshRank, NoObserver, ProgramHandle, Scalar, WeightSource};
use tessera_ir::{Slots, Type, parse_all};
use tessera_mesh::{Mesh, Rank};

struct OnesSource {
    reads: usize,
}

impl WeightSource for OnesSource {
    fn read(&mut self, _: &str, ty: &Type, load: Option<&str>, _: &MeshRank) -> Result<Vec<f32>, Diagnostic> {
        self.reads += 1;
        Ok(vec![if load.is_some() { 2.0 } else { 1.0 }; ty.element_count() as usize])
    }
}

/// Returns a backend of one rank that has loaded the programs of a text, each value in its own
/// slot.
fn load_programs(
    text: &str,
    source: &mut OnesSource,
) -> Result<(CpuBackend, Vec<ProgramHandle>), Diagnostic> {
    let seat = MeshRank { mesh: Mesh::default(), rank: Rank(0) };
    let mut cpu = CpuBackend::new(seat, Pool::single_thread(), Vec::new(), Duration::from_secs(1));
    let mut out = Vec::new();
    for p in parse_all(text, "test").unwrap() {
        let bytes = p.values.iter().map(|v| if v.ty.is_token() { 4 } else { v.ty.byte_size().0 }).collect();
        let of = (0..p.values.len() as u32).map(Some).collect();
        out.push(cpu.load(&Arc::new(p), &Slots { slot_bytes: bytes, value_slots: of }, source)?);
    }
    Ok((cpu, out))
}

fn call_data<'a>(x: &'a [f32], b: &[f32]) -> CallData<'a> {
    CallData {
        scalars: BTreeMap::from([("b", Scalar::F32s(b.to_vec()))]),
        inputs: BTreeMap::from([("x", x)]),
    }
}

#[test]
fn a_too_large_head_is_rejected_at_load() {
    let program = |head: usize| {
        format!(
            "program @p {{ %x = input : f32[1, {head}] %s = call : i64 \
             %y = toperator.rope %x, start = %s {{grid = [1, 1, 1], head_dim = {head}}} \
             output \"y\", %y }}"
        )
    };
    assert!(load_programs(&program(512), &mut OnesSource { reads: 0 }).is_ok());
    let d = load_programs(&program(514), &mut OnesSource { reads: 0 }).unwrap_err();
    assert!(d.code.id == "T0801" && d.message.contains("514 elements, above 512"), "{d:?}");
}

#[test]
fn a_cast_of_a_scalar_is_rejected_at_load() {
    let text = "program @p { %s = call : f32 %y = toperator.cast %s {to = \"f64\"} output \"y\", %y }";
    let d = load_programs(text, &mut OnesSource { reads: 0 }).unwrap_err();
    assert!(d.code.id == "T0801" && d.message.contains("cast in @p"), "{d:?}");
}

#[test]
fn batched_sends_are_accepted_if_none_blocks() {
    let program = |issue: &str, wait: &str| {
        format!(
            "program @p role(r@tp0) mesh(tp=2) {{ %x = input : f32[2] \
             {issue}send %x {{axis = \"tp\", batch = 1, to = 1}} {wait} }}"
        )
    };
    let issued = program("%t = ttile.collective.issue ", "ttile.collective.wait %t");
    assert!(load_programs(&issued, &mut OnesSource { reads: 0 }).is_ok());
    let d = load_programs(&program("ttile.collective.", ""), &mut OnesSource { reads: 0 }).unwrap_err();
    assert!(
        d.code.id == "T0801" && d.message.contains("send in @p") && d.message.contains("one launch"),
        "{d:?}"
    );
}

#[test]
fn wrong_input_lengths_are_faults_and_outputs_are_from_the_last_run() {
    let text = "program @p { %x = input : f32[2, 2] %b = call : f32[2] output \"y\", %x output \"b\", %b }
                program @q { %x = input : f32[1, 2] output \"z\", %x }";
    let (mut cpu, programs) = load_programs(text, &mut OnesSource { reads: 0 }).unwrap();
    cpu.run(programs[0], &call_data(&[1.0, 2.0, 3.0, 4.0], &[5.0, 6.0]), &mut NoObserver).unwrap();
    assert_eq!(cpu.output("y").unwrap(), [1.0, 2.0, 3.0, 4.0]);
    cpu.run(programs[1], &call_data(&[7.0, 8.0], &[]), &mut NoObserver).unwrap();
    assert_eq!((cpu.output("y"), cpu.output("z").unwrap()), (None, &[7.0, 8.0][..]));
    cpu.run(programs[0], &call_data(&[4.0; 4], &[5.0, 6.0]), &mut NoObserver).unwrap();
    assert_eq!((cpu.output("y").unwrap(), cpu.output("z")), (&[4.0; 4][..], None));
    let mut fault = |x: &[f32], b: &[f32]| match cpu.run(programs[0], &call_data(x, b), &mut NoObserver) {
        Err(Fault::Failed(text)) => text,
        other => panic!("{other:?}"),
    };
    assert_eq!(fault(&[0.0; 3], &[1.0, 2.0]), "T0802: @p reads 4 numbers as `x`, but the call provides 3");
    assert_eq!(fault(&[0.0; 4], &[]), "T0802: @p reads 2 numbers as `b`, but the call provides 0");
}

#[test]
fn a_matmul_weight_is_loaded_again_for_another_use() {
    let matmul =
        "%x = input : f32[2, 2] %w = weight \"w\" : f32[2, 2] %y = toperator.matmul %x, %w output \"y\", %y";
    let sum =
        "%x = input : f32[2, 2] %w = weight \"w\" : f32[2, 2] %y = toperator.add %x, %w output \"y\", %y";
    let other = matmul.replace("\"w\"", "\"w\" {load = \"patch\"}");
    let text = format!(
        "program @a {{ {matmul} }} program @b {{ {sum} }} program @c {{ {matmul} }} program @d {{ {other} }}"
    );
    let mut source = OnesSource { reads: 0 };
    let (mut cpu, programs) = load_programs(&text, &mut source).unwrap();
    assert_eq!(source.reads, 3, "packed, plain, and reordered");
    for (program, want) in programs.into_iter().zip([2.0, 2.0, 2.0, 4.0]) {
        cpu.run(program, &call_data(&[1.0; 4], &[]), &mut NoObserver).unwrap();
        assert_eq!(cpu.output("y").unwrap(), [want; 4]);
    }
}

/// A weight source whose elements encode their tensor, position and generation.
struct CountedSource {
    generation: u32,
    refuses: Option<&'static str>,
}

impl WeightSource for CountedSource {
    fn read(&mut self, name: &str, ty: &Type, _: Option<&str>, _: &MeshRank) -> Result<Vec<f32>, Diagnostic> {
        let first = (name.len() as u32 * 1000 + self.generation * 77) as f32;
        Ok((0..ty.element_count()).map(|i| first + i as f32).collect())
    }

    fn check(&mut self, name: &str, _: &Type, _: Option<&str>, _: &MeshRank) -> Result<(), Diagnostic> {
        match self.refuses {
            Some(refused) if refused == name => {
                Err(Diagnostic::error(&tessera_device::T0802, "not this one"))
            }
            _ => Ok(()),
        }
    }
}

/// Two programs that share a weight, which one reads packed and the other plain; `www` has a matrix for each of three groups.
const SHARED: &str = "program @a { %x = input : f32[4, 40] %w = weight \"w\" : f32[70, 40] %c = weight \"cc\" : f32[40] \
    %n = toperator.add %x, %x %y = toperator.matmul %n, %w output \"y\", %y \
    %g = input : f32[3, 4, 20] %k = input : f32[3, 1] %e = weight \"www\" : f32[3, 37, 20] \
    %z = toperator.grouped_matmul %g, %e, %k {rows = 12} output \"z\", %z } \
    program @b { %x = input : f32[4, 40] %w = weight \"w\" : f32[70, 40] %v = toperator.add %w, %w \
    %y = toperator.matmul %x, %v output \"y\", %y }";

fn counted_backend() -> CpuBackend {
    let seat = MeshRank { mesh: Mesh::default(), rank: Rank(0) };
    let mut cpu = CpuBackend::new(seat, Pool::single_thread(), Vec::new(), Duration::from_secs(1));
    for p in parse_all(SHARED, "test").unwrap() {
        let bytes = p.values.iter().map(|v| if v.ty.is_token() { 4 } else { v.ty.byte_size().0 }).collect();
        let of = (0..p.values.len() as u32).map(Some).collect();
        let mut source = CountedSource { generation: 0, refuses: None };
        cpu.load(&Arc::new(p), &Slots { slot_bytes: bytes, value_slots: of }, &mut source).unwrap();
    }
    cpu
}

#[test]
fn a_weight_is_fingerprinted_once_in_any_layout() {
    let mut cpu = counted_backend();
    let prints = cpu.fingerprints();
    let names: Vec<&str> = prints.iter().map(|p| p.tensor.as_str()).collect();
    assert_eq!(names, ["cc", "w", "www"], "a weight stored packed and plain counts once");
    let bytes: Vec<u8> = (0..70 * 40).flat_map(|i| (1000.0 + i as f32).to_le_bytes()).collect();
    let mut whole = tessera_device::FingerprintHasher::default();
    whole.update(&bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<_>>());
    assert_eq!(prints[1], whole.finish("w", "whole"));
    let groups: Vec<f32> = (0..3 * 37 * 20).map(|i| 3000.0 + i as f32).collect();
    let mut whole = tessera_device::FingerprintHasher::default();
    whole.update(&groups);
    assert_eq!(prints[2], whole.finish("www", "whole"));
    assert_eq!(cpu.read_weight("www", 37 * 20 + 5), Some(groups[37 * 20 + 5]));
    assert_eq!(cpu.read_weight("www", 3 * 37 * 20), None);
    let route = cpu.effective_values().into_iter().find(|(key, _)| key.contains("f32[3, 37, 20]"));
    assert_eq!(route.map(|(_, form)| form).as_deref(), Some("packed weight"));

    // One audit round, whatever its budget per step; the largest unit here is the plain weight.
    for budget in [70 * 40 * 4, 12_000, 1 << 20] {
        let (mut looks, mut bytes) = (0, 0);
        loop {
            let seen = cpu.audit_weights(budget);
            assert!(seen.bytes <= budget && seen.changed.is_none());
            (looks, bytes) = (looks + 1, bytes + seen.bytes);
            assert!(looks < 100, "the audit does not end");
            if seen.rounds == 1 {
                break;
            }
        }
        assert_eq!(bytes, (2 * 70 * 40 + 40 + 3 * 37 * 20) * 4, "{looks} audit steps of {budget} bytes");
    }
    assert_eq!(cpu.audit_weights(100).bytes, 0, "less than a unit");
}

#[test]
fn the_audit_covers_every_weight_element() {
    for (name, elements) in [("w", 70 * 40), ("cc", 40), ("www", 3 * 37 * 20)] {
        for index in (0..elements).step_by(7).chain([elements - 1]) {
            let mut cpu = counted_backend();
            assert!(cpu.write_weight(name, index, -1.0));
            let (print, now) =
                cpu.audit_weights(u64::MAX).changed.unwrap_or_else(|| panic!("{name}[{index}]"));
            assert!(print.tensor == name && print.digest != now);
        }
        assert!(!counted_backend().write_weight(name, elements, 0.0));
    }
}

#[test]
fn a_reload_is_atomic() {
    let mut cpu = counted_backend();
    let before = cpu.fingerprints();
    assert!(cpu.reload_weights(&mut CountedSource { generation: 1, refuses: Some("cc") }).is_err());
    assert_eq!(cpu.fingerprints(), before);
    assert_eq!(cpu.audit_weights(u64::MAX).changed, None);
    cpu.audit_weights(3000);
    cpu.reload_weights(&mut CountedSource { generation: 1, refuses: None }).unwrap();
    assert!(cpu.fingerprints().iter().zip(&before).all(|(a, b)| a.digest != b.digest && a.slice == b.slice));
    let seen = cpu.audit_weights(u64::MAX);
    assert!(seen.changed.is_none() && seen.rounds == 1, "a new round begins");
}

#[test]
fn weights_in_bf16_take_half_the_memory_and_keep_their_bits_and_fingerprints() {
    let text = "program @p { %ids = input \"x\" : f32[3] %table = weight \"table\" : f32[40, 64] \
        %w = weight \"w\" : f32[64, 64] %e = toperator.embed %ids, %table \
        %y = toperator.matmul %e, %w output \"y\", %y }";
    let run = |compact: bool| {
        let seat = MeshRank { mesh: Mesh::default(), rank: Rank(0) };
        let mut cpu = CpuBackend::new(seat, Pool::single_thread(), Vec::new(), Duration::from_secs(1));
        if compact {
            cpu.store_bf16_weights();
        }
        let p = parse_all(text, "test").unwrap().remove(0);
        let bytes = p.values.iter().map(|v| v.ty.byte_size().0).collect();
        let slots = Slots { slot_bytes: bytes, value_slots: (0..p.values.len() as u32).map(Some).collect() };
        let program = cpu.load(&Arc::new(p), &slots, &mut OnesSource { reads: 0 }).unwrap();
        let call = CallData { inputs: BTreeMap::from([("x", &[39.0, 0.0, 7.0][..])]), ..CallData::default() };
        cpu.run(program, &call, &mut NoObserver).unwrap();
        (cpu.output("y").unwrap().to_vec(), cpu.fingerprints(), cpu.memory_bytes()[0])
    };
    let ((rows, prints, bytes), (half_rows, half_prints, half_bytes)) = (run(false), run(true));
    assert_eq!((rows, prints), (half_rows, half_prints));
    assert!(bytes > 0 && 2 * half_bytes <= bytes, "{half_bytes} of {bytes}");
}
