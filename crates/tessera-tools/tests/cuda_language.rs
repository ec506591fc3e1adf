//! Compares the ops of a language model on a GPU, in f32 and in bf16, with the reference evaluator and the CPU.
//! Each case runs several calls with other numbers, which must not capture another graph. Without a GPU the tests
//! print the reason and pass, unless `TESSERA_REQUIRE_GPUS` says that there must be one.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use tessera::gpus::{GpuDiscovery, KernelDir, masked_features};
use tessera_base::Diagnostic;
use tessera_base::random::{DrawKey, fill_normals};
use tessera_cpu::{CpuBackend, Pool};
use tessera_cuda::{CudaBackend, CudaOptions, REQUIRE_GPUS, assert_may_skip};
use tessera_device::{Backend, CallData, MeshRank, Observer, ProgramHandle, Scalar, WeightSource};
use tessera_filetests::dedicated_slots;
use tessera_ir::{Program, Type, parse_all};
use tessera_mesh::{Mesh, Rank};
use tessera_reference::{CallInputs, CallScalar, Evaluator, Tensor};

struct NoopObserver;
impl Observer for NoopObserver {
    fn on_issued(&mut self, _: usize) {}
    fn on_progress(&mut self, _: u32) {}
}

fn find_gpu() -> Option<GpuDiscovery> {
    let found = GpuDiscovery::discover();
    let why = match &found.devices {
        Ok(d) if !d.gpus.is_empty() => return Some(found),
        Ok(_) => "the driver reports no GPU".to_string(),
        Err(d) => d.message.clone(),
    };
    assert_may_skip(std::env::var(REQUIRE_GPUS).ok().as_deref(), 1, &why);
    println!("not run: {why}");
    None
}

/// Named numbers with their shapes.
type Numbers = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// A program of one phase, its weights, and the inputs and scalars of each call.
struct Case {
    name: String,
    text: String,
    weights: Numbers,
    calls: Vec<(Numbers, Numbers)>,
}

/// Writes a program in a dtype: inputs are cast to it and outputs from it.
struct CaseWriter {
    dtype: &'static str,
    declarations: String,
    body: String,
    case: Case,
}

const DTYPES: [&str; 2] = ["f32", "bf16"];

impl CaseWriter {
    fn new(dtype: &'static str, name: impl Into<String>, calls: usize) -> CaseWriter {
        let case = Case {
            name: format!("{} {dtype}", name.into()),
            text: String::new(),
            weights: Numbers::new(),
            calls: vec![Default::default(); calls],
        };
        CaseWriter { dtype, declarations: String::new(), body: String::new(), case }
    }

    /// Adds an input of normals in the dtype of the case.
    fn operand(&mut self, name: &str, shape: &[usize]) {
        let to = self.dtype;
        if to == "f32" {
            return self.input(name, shape);
        }
        self.input(&format!("{name}0"), shape);
        writeln!(self.body, "%{name} = toperator.cast %{name}0 {{to = \"{to}\"}}").unwrap();
    }

    /// Adds an input of normals in f32.
    fn input(&mut self, name: &str, shape: &[usize]) {
        writeln!(self.declarations, "%{name} = input \"{name}\" : f32{shape:?}").unwrap();
        for (call, (inputs, _)) in self.case.calls.iter_mut().enumerate() {
            inputs.insert(name.to_string(), (shape.to_vec(), normals(shape, name, call)));
        }
    }

    /// Adds a weight of normals.
    fn weight(&mut self, name: &str, dtype: &str, shape: &[usize]) {
        writeln!(self.declarations, "%{name} = weight \"{name}\" : {dtype}{shape:?}").unwrap();
        // Exact in bf16, so that loading them rounds nothing.
        let values = normals(shape, name, 0).into_iter().map(|x| f32::from_bits(x.to_bits() & 0xffff_0000));
        self.case.weights.insert(name.to_string(), (shape.to_vec(), values.collect()));
    }

    /// Adds numbers of the call.
    fn scalar(&mut self, name: &str, shape: &[usize], by_call: &[&[f32]]) {
        writeln!(self.declarations, "%{name} = call \"{name}\" : f32{shape:?}").unwrap();
        for ((_, scalars), values) in self.case.calls.iter_mut().zip(by_call) {
            scalars.insert(name.to_string(), (shape.to_vec(), values.to_vec()));
        }
    }

    fn line(&mut self, text: impl AsRef<str>) {
        self.body += text.as_ref();
        self.body.push('\n');
    }

    /// Returns a value of the dtype of the case.
    fn output(&mut self, name: &str) {
        if self.dtype == "f32" {
            return self.line(format!("output \"{name}\", %{name}"));
        }
        self.line(format!("%{name}1 = toperator.cast %{name} {{to = \"f32\"}}"));
        self.line(format!("output \"{name}\", %{name}1"));
    }

    fn finish(self, buffers: &str) -> Case {
        let text = format!("program @p {{\n{buffers}\n{}{}}}", self.declarations, self.body);
        Case { text, ..self.case }
    }
}

fn normals(shape: &[usize], name: &str, call: usize) -> Vec<f32> {
    let mut values = vec![0.0; shape.iter().product()];
    let seed = name.bytes().fold(17, |h: u64, b| h.wrapping_mul(31) + u64::from(b));
    fill_normals(DrawKey { seed, chunk: call as u32, draw: 0 }, 0, &mut values);
    values
}

struct CaseWeights<'a>(&'a Numbers);

impl WeightSource for CaseWeights<'_> {
    fn read(&mut self, name: &str, _: &Type, _: Option<&str>, _: &MeshRank) -> Result<Vec<f32>, Diagnostic> {
        Ok(self.0[name].1.clone())
    }
}

fn parse_case(case: &Case) -> Arc<Program> {
    let mut program =
        parse_all(&case.text, &case.name).unwrap_or_else(|e| panic!("{e:#?}\n{}", case.text)).remove(0);
    program.capture_into("p");
    Arc::new(program)
}

fn load(backend: &mut dyn Backend, program: &Arc<Program>, case: &Case) -> ProgramHandle {
    let loaded = backend.load(program, &dedicated_slots(program), &mut CaseWeights(&case.weights));
    loaded.unwrap_or_else(|e| panic!("{}: {}", case.name, e.message))
}

/// Runs a call and returns the outputs by name.
fn run_call(
    backend: &mut dyn Backend,
    (loaded, program): (ProgramHandle, &Program),
    (inputs, scalars): &(Numbers, Numbers),
) -> BTreeMap<String, Vec<f32>> {
    let call = CallData {
        inputs: inputs.iter().map(|(k, (_, v))| (k.as_str(), &v[..])).collect(),
        scalars: scalars.iter().map(|(k, (_, v))| (k.as_str(), Scalar::F32s(v.clone()))).collect(),
    };
    backend.run(loaded, &call, &mut NoopObserver).unwrap();
    let names = program.ops.iter().filter(|op| op.opcode == tessera_ir::Opcode::Output);
    names
        .filter_map(|op| op.name.clone())
        .map(|n| (n.clone(), backend.output(&n).unwrap().to_vec()))
        .collect()
}

fn open_gpu(found: &GpuDiscovery) -> CudaBackend {
    let options = CudaOptions {
        device_index: 0,
        kernel_cache: Some(Arc::new(KernelDir(std::env::temp_dir().join("tessera-kernels")))),
        peer_timeout: Duration::from_secs(20),
        setup_timeout: Duration::from_secs(20),
        host_id: 0,
        masked_features: masked_features().unwrap(),
    };
    let seat = MeshRank { mesh: Mesh::default(), rank: Rank(0) };
    CudaBackend::open(&found.libraries, seat, Vec::new(), options).unwrap()
}

fn to_tensor((shape, values): &(Vec<usize>, Vec<f32>)) -> Tensor {
    Tensor::new(shape, values.iter().map(|x| f64::from(*x)).collect())
}

/// Runs cases on the GPU and in the evaluator, and returns what differs by more than the bound of the dtype,
/// relative to the largest element of the output.
fn find_differences(found: &GpuDiscovery, cases: &[Case]) -> Vec<String> {
    let mut wrong = Vec::new();
    for case in cases {
        let program = parse_case(case);
        let mut reference = Evaluator::new(Mesh::default());
        reference.load_weights(case.weights.iter().map(|(k, v)| (k.clone(), to_tensor(v))));
        let mut gpu = open_gpu(found);
        let loaded = load(&mut gpu, &program, case);
        for (i, call) in case.calls.iter().enumerate() {
            let mut inputs = CallInputs::default();
            for (k, v) in &call.0 {
                inputs = inputs.with_input(k, to_tensor(v));
            }
            inputs.scalars =
                call.1.iter().map(|(k, v)| (k.clone(), CallScalar::Float(to_tensor(v)))).collect();
            let expected =
                reference.run(&[&program], &inputs).unwrap_or_else(|e| panic!("{}: {e}", case.name));
            let got = run_call(&mut gpu, (loaded, &program), call);
            let again = run_call(&mut gpu, (loaded, &program), call);
            for (name, expected) in &expected[0] {
                let scale = expected.data().iter().fold(1e-30, |m: f64, x| m.max(x.abs()));
                let far = got[name].iter().zip(expected.data());
                let error = far.fold(0.0, |m: f64, (a, b)| {
                    let d = (f64::from(*a) - b).abs();
                    if d.is_nan() { f64::INFINITY } else { m.max(d) }
                }) / scale;
                let limit = if case.name.ends_with("bf16") { 1e-2 } else { 5e-6 };
                println!(
                    "{} call {i}, {name} {:?}: largest error {error:.1e} of {scale:.3}",
                    case.name,
                    expected.shape()
                );
                if error > limit || got[name].len() != expected.data().len() {
                    wrong.push(format!("{} call {i}, {name}: {error:e}", case.name));
                }
                if got[name] != again[name] {
                    wrong.push(format!("{} call {i}, {name}: a replay computes other bits", case.name));
                }
            }
        }
        if gpu.one_time_counts().graphs_captured != 1 {
            wrong.push(format!("{}: {:?}", case.name, gpu.one_time_counts()));
        }
    }
    wrong
}

/// Extents of an attention over pages. A call fills a part of the cache, writes its own rows and attends.
#[derive(Debug, Clone, Copy)]
struct Attention {
    sequences: usize,
    rows: usize,
    heads: usize,
    kv_heads: usize,
    head: usize,
    page_rows: usize,
    pages: usize,
    fill: usize,
    mask: &'static str,
}

fn attention_case(dtype: &'static str, a: Attention) -> Case {
    let mut w = CaseWriter::new(dtype, format!("paged_attention {a:?}"), 3);
    let (b, n, kv) = (a.sequences, a.rows, a.kv_heads * a.head);
    w.operand("q", &[b * n, a.heads * a.head]);
    w.operand("k", &[b * n, kv]);
    w.operand("v", &[b * n, kv]);
    w.operand("old", &[b * a.fill, kv]);
    // Pages in another order in each call; one sequence lacks its last page.
    let count = b * a.pages;
    let table = |step: usize| -> Vec<f32> {
        let mut pages: Vec<f32> = (0..count).map(|i| (((i + step) * 7 + step) % count) as f32).collect();
        let mut sorted = pages.clone();
        sorted.sort_by(f32::total_cmp);
        sorted.dedup();
        if sorted.len() < count {
            pages = (0..count).map(|i| ((i + step) % count) as f32).collect();
        }
        if step == 2 {
            pages[count - 1] = -1.0;
        }
        pages
    };
    let tables = [table(0), table(1), table(2)];
    w.scalar("pages", &[b, a.pages], &[&tables[0], &tables[1], &tables[2]]);
    let zeros = vec![0.0; b];
    w.scalar("begin", &[b], &[&zeros, &zeros, &zeros]);
    let starts = |first: usize| -> Vec<f32> { (0..b).map(|s| first.saturating_sub(3 * s) as f32).collect() };
    let (full, half) = (starts(a.fill), starts(a.fill / 2));
    let mut absent = starts(a.fill / 3);
    absent[b - 1] = if b > 1 { -1.0 } else { absent[0] };
    w.scalar("start", &[b], &[&full, &half, &absent]);
    let pages = format!("pages=%pages, start=%start {{page_rows = {}}}", a.page_rows);
    let old = format!("pages=%pages, start=%begin {{page_rows = {}}}", a.page_rows);
    for (cache, rows) in [("kv.k", "k"), ("kv.v", "v")] {
        w.line(format!("cache.write @{cache}, %old, {old}"));
        w.line(format!("cache.write @{cache}, %{rows}, {pages}"));
        w.line(format!("%{rows}c = cache.read @{cache}"));
    }
    w.line(format!(
        "%o = toperator.paged_attention %q, %kc, %vc, pages=%pages, start=%start {{head_dim = {}, page_rows = {}{}}}",
        a.head, a.page_rows, a.mask
    ));
    w.output("o");
    let buffer = |name: &str| format!("buffer @{name} : {dtype}[{}, {kv}]\n", count * a.page_rows);
    w.finish(&(buffer("kv.k") + &buffer("kv.v")))
}

#[test]
fn attention_over_pages_agrees_with_the_reference() {
    let Some(found) = find_gpu() else { return };
    let long = Attention {
        sequences: 1,
        rows: 1,
        heads: 8,
        kv_heads: 2,
        head: 128,
        page_rows: 16,
        pages: 48,
        fill: 700,
        mask: "",
    };
    let shapes = [
        long,
        Attention { mask: ", window = 100, sink = 5", ..long },
        Attention { heads: 14, head: 64, ..long },
        Attention {
            sequences: 3,
            heads: 3,
            kv_heads: 3,
            head: 20,
            page_rows: 5,
            pages: 30,
            fill: 131,
            ..long
        },
        Attention { sequences: 2, rows: 37, heads: 6, head: 80, page_rows: 8, pages: 25, fill: 140, ..long },
        Attention { rows: 70, heads: 4, head: 256, mask: ", window = 9", ..long },
        Attention { sequences: 2, rows: 5, heads: 4, head: 6, page_rows: 3, pages: 9, fill: 17, ..long },
    ];
    let cases: Vec<Case> =
        DTYPES.iter().flat_map(|dtype| shapes.map(|shape| attention_case(dtype, shape))).collect();
    let wrong = find_differences(&found, &cases);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

fn position_case(dtype: &'static str, (heads, head, pairs): (usize, usize, usize)) -> Case {
    let mut w = CaseWriter::new(dtype, format!("rotary and head_norm of {heads} heads of {head}"), 2);
    w.operand("x", &[6, heads * head]);
    w.weight("norm", "f32", &[head]);
    w.weight("frequencies", "f32", &[pairs]);
    w.scalar("start", &[2], &[&[0.0, 4099.0], &[77.0, 3.0]]);
    w.line(format!("%n = toperator.head_norm %x, %norm {{eps = 1e-6, head_dim = {head}}}"));
    w.line(format!(
        "%r = toperator.rotary %x, %frequencies, start=%start {{head_dim = {head}, scale = 1.25}}"
    ));
    w.output("n");
    w.output("r");
    w.finish("")
}

fn expert_case(dtype: &'static str, [tokens, experts, k, d, inner, capacity]: [usize; 6]) -> Case {
    let shape = format!("{tokens} tokens, {k} of {experts} experts of {d} by {inner}, {capacity} slots");
    let mut w = CaseWriter::new(dtype, format!("experts: {shape}"), 2);
    w.operand("x", &[tokens, d]);
    w.input("logits", &[tokens, experts]);
    w.weight("up", dtype, &[experts, inner, d]);
    w.weight("down", dtype, &[experts, d, inner]);
    w.line(format!("%e = toperator.top_k_experts %logits {{top_k = {k}}}"));
    w.line("%g = toperator.expert_weights %logits, %e");
    w.line("%rg = toperator.expert_weights %logits, %e {renormalise = true}");
    w.line(format!("%s = toperator.expert_slots %e {{capacity = {capacity}}}"));
    w.line(format!("%c = toperator.expert_counts %e, %s {{groups = {experts}}}"));
    w.line(format!("%p = toperator.expert_pack %x, %e, %s {{capacity = {capacity}, groups = {experts}}}"));
    let rows = tokens * k;
    w.line(format!("%h = toperator.grouped_matmul %p, %up, %c {{act = \"silu\", rows = {rows}}}"));
    w.line(format!("%y = toperator.grouped_matmul %h, %down, %c {{rows = {rows}}}"));
    w.line("%o = toperator.expert_combine %y, %e, %s, %rg");
    for name in ["e", "g", "rg", "s", "c"] {
        w.line(format!("output \"{name}\", %{name}"));
    }
    for name in ["p", "h", "o"] {
        w.output(name);
    }
    w.finish("")
}

fn small_matmul_case(dtype: &'static str, [rows, k, m]: [usize; 3]) -> Case {
    let mut w = CaseWriter::new(dtype, format!("matmul [{rows}, {k}] by [{m}, {k}]"), 1);
    w.operand("x", &[rows, k]);
    w.weight("w", dtype, &[m, k]);
    w.weight("b", dtype, &[m]);
    w.line("%y = toperator.matmul %x, %w, bias=%b");
    w.line("%z = toperator.matmul %x, %w {act = \"silu\"}");
    w.output("y");
    w.output("z");
    w.finish("")
}

#[test]
fn positions_experts_and_matmuls_of_few_rows_agree_with_the_reference() {
    let Some(found) = find_gpu() else { return };
    let mut cases = Vec::new();
    for dtype in DTYPES {
        cases.extend([(3, 6, 3), (5, 128, 64), (2, 80, 20)].map(|shape| position_case(dtype, shape)));
        cases.extend(
            [[1, 8, 2, 64, 40, 1], [37, 5, 3, 72, 33, 37], [29, 7, 2, 24, 16, 4], [130, 40, 8, 32, 8, 130]]
                .map(|shape| expert_case(dtype, shape)),
        );
        cases.extend((1..=8).map(|rows| small_matmul_case(dtype, [rows, 72 * rows, 37])));
        cases.extend([[1, 4096, 64], [3, 77, 13], [2, 1000, 9]].map(|shape| small_matmul_case(dtype, shape)));
    }
    let wrong = find_differences(&found, &cases);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn ids_are_those_of_the_cpu() {
    let Some(found) = find_gpu() else { return };
    for (rows, vocabulary) in [(1, 1), (7, 5), (64, 3001), (6, 151_936)] {
        let mut w = CaseWriter::new("f32", format!("sample [{rows}, {vocabulary}]"), 3);
        w.input("logits", &[rows, vocabulary]);
        let numbers = |f: &dyn Fn(usize) -> f32| -> Vec<Vec<f32>> {
            (0..3).map(|call| (0..rows).map(|i| f(call * rows + i)).collect()).collect()
        };
        let chosen: [(&str, &dyn Fn(usize) -> f32); 5] = [
            ("temperature", &|i| [1.0, 0.0, 0.3, 2.5, 0.7][i % 5]),
            ("top_k", &|i| [0.0, 3.0, 50.0, 1.0][i % 4]),
            ("top_p", &|i| [1.0, 0.9, 0.1, 0.0, 0.999, 0.5, 1.0][i % 7]),
            ("seed", &|i| (i / 3) as f32),
            ("draw", &|i| (i * 1000) as f32),
        ];
        for (name, f) in chosen {
            let by_call = numbers(f);
            w.scalar(name, &[rows], &by_call.iter().map(|v| &v[..]).collect::<Vec<_>>());
        }
        // Equal logits, of which the lower id comes first.
        for (inputs, _) in &mut w.case.calls {
            let logits = &mut inputs.get_mut("logits").unwrap().1;
            logits.iter_mut().for_each(|x| *x = (*x * 16.0).round() / 4.0);
        }
        w.line(
            "%s = toperator.sample %logits, draw=%draw, seed=%seed, temperature=%temperature, top_k=%top_k, top_p=%top_p",
        );
        w.line("output \"s\", %s");
        let case = w.finish("");
        let program = parse_case(&case);
        let seat = MeshRank { mesh: Mesh::default(), rank: Rank(0) };
        let mut cpu = CpuBackend::new(seat, Pool::new(2).unwrap(), Vec::new(), Duration::from_secs(9));
        let mut gpu = open_gpu(&found);
        let (on_cpu, on_gpu) = (load(&mut cpu, &program, &case), load(&mut gpu, &program, &case));
        for call in &case.calls {
            let expected = run_call(&mut cpu, (on_cpu, &program), call);
            let ids = run_call(&mut gpu, (on_gpu, &program), call);
            println!("{}: {:?}", case.name, &ids["s"][..rows.min(8)]);
            assert_eq!(ids, expected, "{}", case.name);
        }
        assert_eq!(gpu.one_time_counts().graphs_captured, 1);
    }
}

#[test]
fn pages_and_counts_that_a_kernel_could_not_use_are_refused() {
    let Some(found) = find_gpu() else { return };
    let small = Attention {
        sequences: 1,
        rows: 1,
        heads: 1,
        kv_heads: 1,
        head: 8,
        page_rows: 2,
        pages: 3,
        fill: 2,
        mask: "",
    };
    let case = attention_case("f32", small);
    let program = parse_case(&case);
    let mut gpu = open_gpu(&found);
    let loaded = load(&mut gpu, &program, &case);
    for (name, values, says) in [
        ("pages", vec![0.0, 3.0, 1.0], "page 3 of a pool of 3 pages"),
        ("pages", vec![0.0, 0.5, 1.0], "0.5 is no page"),
        ("start", vec![f32::NAN], "NaN is no page"),
    ] {
        let (inputs, mut scalars) = case.calls[0].clone();
        scalars.get_mut(name).unwrap().1 = values;
        let call = CallData {
            inputs: inputs.iter().map(|(k, (_, v))| (k.as_str(), &v[..])).collect(),
            scalars: scalars.iter().map(|(k, (_, v))| (k.as_str(), Scalar::F32s(v.clone()))).collect(),
        };
        let fault = gpu.run(loaded, &call, &mut NoopObserver).unwrap_err();
        assert!(format!("{fault:?}").contains(says), "{fault:?}");
    }
}
