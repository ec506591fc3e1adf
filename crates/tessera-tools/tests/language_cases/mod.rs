//! Programs of one phase, written op by op, that run on a GPU and in the reference evaluator. Each case runs several
//! calls with other numbers, which must not capture another graph.

#![allow(dead_code, clippy::unwrap_used, reason = "each test uses a part of this file")]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tessera::gpus::{GpuDiscovery, KernelDir, masked_features};
use tessera_base::Diagnostic;
use tessera_base::random::{DrawKey, fill_normals};
use tessera_cuda::{CudaBackend, CudaOptions};
use tessera_device::{Backend, CallData, MeshRank, NoObserver, ProgramHandle, Scalar, WeightSource};
use tessera_filetests::dedicated_slots;
use tessera_ir::{Program, Type, parse_all};
use tessera_mesh::{Mesh, Rank};
use tessera_reference::{CallInputs, CallScalar, Evaluator, Tensor};

use crate::gpu_ranks::find_gpus;

pub fn find_gpu() -> Option<Arc<GpuDiscovery>> {
    Some(find_gpus(1)?.0)
}

/// Waits until no other test of this process uses the GPU. Backends of one process share a context of a device, in which
/// a call of one can end the capture of a graph by another; a rank is the only backend of its process.
pub fn take_turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Named numbers with their shapes.
pub type Numbers = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// A program of one phase, its weights, and the inputs and scalars of each call.
pub struct Case {
    pub name: String,
    pub text: String,
    pub weights: Numbers,
    pub calls: Vec<(Numbers, Numbers)>,
    /// Outputs that must equal those of the reference, because they are whole numbers or copies.
    pub exact: BTreeSet<String>,
}

/// Writes a program in a dtype: inputs are cast to it and outputs from it.
pub struct CaseWriter {
    pub dtype: &'static str,
    pub declarations: String,
    pub body: String,
    pub case: Case,
}

pub const DTYPES: [&str; 2] = ["f32", "bf16"];

impl CaseWriter {
    pub fn new(dtype: &'static str, name: impl Into<String>, calls: usize) -> CaseWriter {
        let case = Case {
            name: format!("{} {dtype}", name.into()),
            text: String::new(),
            weights: Numbers::new(),
            calls: vec![Default::default(); calls],
            exact: BTreeSet::new(),
        };
        CaseWriter { dtype, declarations: String::new(), body: String::new(), case }
    }

    /// Adds an input of normals in the dtype of the case.
    pub fn operand(&mut self, name: &str, shape: &[usize]) {
        let to = self.dtype;
        if to == "f32" {
            return self.input(name, shape);
        }
        self.input(&format!("{name}0"), shape);
        writeln!(self.body, "%{name} = toperator.cast %{name}0 {{to = \"{to}\"}}").unwrap();
    }

    /// Adds an input of normals in f32.
    pub fn input(&mut self, name: &str, shape: &[usize]) {
        writeln!(self.declarations, "%{name} = input \"{name}\" : f32{shape:?}").unwrap();
        for (call, (inputs, _)) in self.case.calls.iter_mut().enumerate() {
            inputs.insert(name.to_string(), (shape.to_vec(), normals(shape, name, call)));
        }
    }

    /// Rounds an input to quarters, so that some of its numbers are equal. They have distinct sizes, because scores of a
    /// number and of its negative have sums that round alike by chance alone.
    pub fn round_input(&mut self, name: &str) {
        for (inputs, _) in &mut self.case.calls {
            let numbers = &mut inputs.get_mut(name).unwrap().1;
            numbers.iter_mut().for_each(|x| *x = (*x * 4.0).round() / 4.0 + 0.0625);
        }
    }

    /// Adds a weight of normals.
    pub fn weight(&mut self, name: &str, dtype: &str, shape: &[usize]) {
        writeln!(self.declarations, "%{name} = weight \"{name}\" : {dtype}{shape:?}").unwrap();
        // Exact in bf16, so that loading them rounds nothing.
        let values = normals(shape, name, 0).into_iter().map(|x| f32::from_bits(x.to_bits() & 0xffff_0000));
        self.case.weights.insert(name.to_string(), (shape.to_vec(), values.collect()));
    }

    /// Adds numbers of the call.
    pub fn scalar(&mut self, name: &str, shape: &[usize], by_call: &[&[f32]]) {
        writeln!(self.declarations, "%{name} = call \"{name}\" : f32{shape:?}").unwrap();
        for ((_, scalars), values) in self.case.calls.iter_mut().zip(by_call) {
            scalars.insert(name.to_string(), (shape.to_vec(), values.to_vec()));
        }
    }

    pub fn line(&mut self, text: impl AsRef<str>) {
        self.body += text.as_ref();
        self.body.push('\n');
    }

    /// Returns a value of the dtype of the case.
    pub fn output(&mut self, name: &str) {
        if self.dtype == "f32" {
            return self.line(format!("output \"{name}\", %{name}"));
        }
        self.line(format!("%{name}1 = toperator.cast %{name} {{to = \"f32\"}}"));
        self.line(format!("output \"{name}\", %{name}1"));
    }

    /// Returns a value of whole numbers in f32, or a value that is copied from an input.
    pub fn exact_output(&mut self, name: &str) {
        self.case.exact.insert(name.to_string());
        self.line(format!("output \"{name}\", %{name}"));
    }

    pub fn finish(self, buffers: &str) -> Case {
        let text = format!("program @p {{\n{buffers}\n{}{}}}", self.declarations, self.body);
        Case { text, ..self.case }
    }

    /// Ends a program that each rank of a mesh runs.
    pub fn finish_on(self, mesh: &str) -> Case {
        let body = self.body.replace("toperator.", "ttile.");
        let text = format!("program @p role(r) mesh({mesh}) {{\n{}{body}}}", self.declarations);
        Case { text, ..self.case }
    }
}

pub fn normals(shape: &[usize], name: &str, call: usize) -> Vec<f32> {
    let mut values = vec![0.0; shape.iter().product()];
    let seed = name.bytes().fold(17, |h: u64, b| h.wrapping_mul(31) + u64::from(b));
    fill_normals(DrawKey { seed, chunk: call as u32, draw: 0 }, 0, &mut values);
    values
}

pub struct CaseWeights<'a>(&'a Numbers);

impl WeightSource for CaseWeights<'_> {
    fn read(&mut self, name: &str, _: &Type, _: Option<&str>, _: &MeshRank) -> Result<Vec<f32>, Diagnostic> {
        Ok(self.0[name].1.clone())
    }
}

pub fn parse_case(case: &Case) -> Arc<Program> {
    let mut program =
        parse_all(&case.text, &case.name).unwrap_or_else(|e| panic!("{e:#?}\n{}", case.text)).remove(0);
    program.capture_into("p");
    Arc::new(program)
}

pub fn load(backend: &mut dyn Backend, program: &Arc<Program>, case: &Case) -> ProgramHandle {
    let loaded = backend.load(program, &dedicated_slots(program), &mut CaseWeights(&case.weights));
    loaded.unwrap_or_else(|e| panic!("{}: {}", case.name, e.message))
}

/// Runs a call and returns the outputs by name.
pub fn run_call(
    backend: &mut dyn Backend,
    (loaded, program): (ProgramHandle, &Program),
    (inputs, scalars): &(Numbers, Numbers),
) -> BTreeMap<String, Vec<f32>> {
    let call = CallData {
        inputs: inputs.iter().map(|(k, (_, v))| (k.as_str(), &v[..])).collect(),
        scalars: scalars.iter().map(|(k, (_, v))| (k.as_str(), Scalar::F32s(v.clone()))).collect(),
    };
    backend.run(loaded, &call, &mut NoObserver).unwrap();
    let names = program.ops.iter().filter(|op| op.opcode == tessera_ir::Opcode::Output);
    names
        .filter_map(|op| op.name.clone())
        .map(|n| (n.clone(), backend.output(&n).unwrap().to_vec()))
        .collect()
}

pub fn open_gpu(found: &GpuDiscovery, seat: MeshRank) -> CudaBackend {
    let options = CudaOptions {
        device_index: 0,
        kernel_cache: Some(Arc::new(KernelDir(std::env::temp_dir().join("tessera-kernels")))),
        peer_timeout: Duration::from_secs(20),
        setup_timeout: Duration::from_secs(20),
        host_id: 0,
        masked_features: masked_features().unwrap(),
        thread_rank: None,
    };
    CudaBackend::open(&found.libraries, seat, Vec::new(), options).unwrap()
}

pub fn to_tensor((shape, values): &(Vec<usize>, Vec<f32>)) -> Tensor {
    Tensor::new(shape, values.iter().map(|x| f64::from(*x)).collect())
}

/// The only rank of a program without a mesh.
pub fn only_seat() -> MeshRank {
    MeshRank { mesh: Mesh::default(), rank: Rank(0) }
}

/// Runs cases on the GPU, the ranks of a mesh one after another, and in the evaluator. Returns what differs by more than
/// the bound of the dtype, relative to the largest element of the output.
pub fn find_differences(found: &GpuDiscovery, cases: &[Case]) -> Vec<String> {
    let mut wrong = Vec::new();
    for case in cases {
        let program = parse_case(case);
        let mesh = program.mesh;
        let expected: Vec<_> = case.calls.iter().map(|call| evaluate(case, &program, call)).collect();
        for rank in mesh.iter() {
            let mut gpu = open_gpu(found, MeshRank { mesh, rank });
            let loaded = load(&mut gpu, &program, case);
            for (i, call) in case.calls.iter().enumerate() {
                let got = run_call(&mut gpu, (loaded, &program), call);
                let again = run_call(&mut gpu, (loaded, &program), call);
                for (name, expected) in &expected[i][rank.0 as usize] {
                    let place = format!("{} rank {rank} call {i}, {name}", case.name);
                    wrong.extend(compare_output(case, (&place, name), &got[name], expected));
                    if got[name] != again[name] {
                        wrong.push(format!("{place}: a replay computes other bits"));
                    }
                }
            }
            if gpu.one_time_counts().graphs_captured != 1 {
                wrong.push(format!("{}: {:?}", case.name, gpu.one_time_counts()));
            }
        }
    }
    wrong
}

/// Returns the outputs of each rank in a call, as the evaluator computes them.
pub fn evaluate(
    case: &Case,
    program: &Program,
    (inputs, scalars): &(Numbers, Numbers),
) -> Vec<BTreeMap<String, Tensor>> {
    let mut reference = Evaluator::new(program.mesh);
    reference.load_weights(case.weights.iter().map(|(k, v)| (k.clone(), to_tensor(v))));
    let mut call = CallInputs::default();
    for (k, v) in inputs {
        call = call.with_input(k, to_tensor(v));
    }
    call.scalars = scalars.iter().map(|(k, v)| (k.clone(), CallScalar::Float(to_tensor(v)))).collect();
    let ranks: Vec<&Program> = program.mesh.iter().map(|_| program).collect();
    reference.run(&ranks, &call).unwrap_or_else(|e| panic!("{}: {e}", case.name))
}

/// Compares an output with the evaluator's, and returns a sentence if they differ.
pub fn compare_output(
    case: &Case,
    (place, name): (&str, &str),
    got: &[f32],
    expected: &Tensor,
) -> Option<String> {
    let scale = expected.data().iter().fold(1e-30, |m: f64, x| m.max(x.abs()));
    let far = got.iter().zip(expected.data());
    let error = far.fold(0.0, |m: f64, (a, b)| {
        let d = (f64::from(*a) - b).abs();
        if d.is_nan() { f64::INFINITY } else { m.max(d) }
    }) / scale;
    let limit = match case.exact.contains(name) {
        true => 0.0,
        false if case.name.ends_with("bf16") => 1e-2,
        false => 5e-6,
    };
    println!("{place} {:?}: largest error {error:.1e} of {scale:.3}", expected.shape());
    (error > limit || got.len() != expected.data().len()).then(|| format!("{place}: {error:e}"))
}

/// Extents of an attention over pages. A call fills a part of the cache, writes its own rows and attends.
#[derive(Debug, Clone, Copy)]
pub struct Attention {
    pub sequences: usize,
    pub rows: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head: usize,
    pub page_rows: usize,
    pub pages: usize,
    pub fill: usize,
    /// Columns of a head that are values.
    pub value_dim: usize,
    /// Whether the rows of one cache are keys and values.
    pub is_latent: bool,
    pub mask: &'static str,
}

/// Returns a case of attention over pages.
pub fn attention_case(dtype: &'static str, a: Attention) -> Case {
    let mut w = CaseWriter::new(dtype, format!("paged_attention {a:?}"), 3);
    let (b, n, kv) = (a.sequences, a.rows, a.kv_heads * a.head);
    w.operand("q", &[b * n, a.heads * a.head]);
    w.operand("k", &[b * n, kv]);
    if !a.is_latent {
        w.operand("v", &[b * n, kv]);
    }
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
    let caches = [("kv.k", "k"), ("kv.v", "v")];
    let caches = &caches[..if a.is_latent { 1 } else { 2 }];
    for (cache, rows) in caches {
        w.line(format!("cache.write @{cache}, %old, {old}"));
        w.line(format!("cache.write @{cache}, %{rows}, {pages}"));
        w.line(format!("%{rows}c = cache.read @{cache}"));
    }
    let values = match a.value_dim == a.head {
        true => String::new(),
        false => format!(", value_dim = {}", a.value_dim),
    };
    let v = if a.is_latent { "k" } else { "v" };
    w.line(format!(
        "%o = toperator.paged_attention %q, %kc, %{v}c, pages=%pages, start=%start {{head_dim = {}, page_rows = {}{values}{}}}",
        a.head, a.page_rows, a.mask
    ));
    w.output("o");
    let buffer = |name: &str| format!("buffer @{name} : {dtype}[{}, {kv}]\n", count * a.page_rows);
    w.finish(&caches.iter().map(|(cache, _)| buffer(cache)).collect::<String>())
}
