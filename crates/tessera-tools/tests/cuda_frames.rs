//! Compares the ops on frames in bf16 and e4m3 on a GPU with f32 on the CPU. Without a GPU the tests print the
//! reason and pass, unless `TESSERA_REQUIRE_GPUS` says that there must be one.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod gpu_ranks;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use gpu_ranks::find_gpus;
use tessera::gpus::{GpuDiscovery, masked_features};
use tessera_base::random::{DrawKey, fill_normals};
use tessera_cpu::{CpuBackend, Pool};
use tessera_cuda::{CudaBackend, CudaOptions};
use tessera_device::{Backend, CallData, MeshRank, NoObserver};
use tessera_filetests::dedicated_slots;
use tessera_ir::{Program, parse_all};
use tessera_mesh::Rank;
use tessera_tools::bench::SyntheticWeights;

fn find_gpu() -> Option<Arc<GpuDiscovery>> {
    Some(find_gpus(1)?.0)
}

/// A convolution of normalised frames, and what surrounds it.
#[derive(Debug, Clone, Copy)]
struct Case {
    size: [usize; 4],
    out: usize,
    kernel: [usize; 3],
    step: usize,
}

impl Case {
    fn has_residual(&self) -> bool {
        self.step == 1 && self.size[3] == self.out
    }

    /// Whether the convolution can be e4m3: cells have a multiple of 16 bytes.
    fn fits_e4m3(&self) -> bool {
        self.kernel == CUBE && self.size[3].is_multiple_of(16)
    }

    /// Writes the program in a dtype: cast, norm, SiLU, convolution with a history, and a sum. In e4m3, only
    /// the operands of the convolution are.
    fn program(&self, dtype: &str) -> String {
        let ([t, h, w, c], [kt, kh, kw], o) = (self.size, self.kernel, self.out);
        let (multiplied, dtype) = (dtype, if dtype == "e4m3" { "bf16" } else { dtype });
        let is_e4m3 = multiplied == "e4m3";
        let taps = kt * kh * kw;
        let mut p = format!("program @p {{\nbuffer @past : {multiplied}[2, {h}, {w}, {c}]\n");
        let mut line = |text: String| writeln!(p, "{text}").unwrap();
        line(format!("%x = input : f32[{t}, {h}, {w}, {c}]"));
        line(format!("%g = weight \"norm.weight\" : f32[{c}]"));
        weight_lines(multiplied, [o, taps * c]).into_iter().for_each(&mut line);
        line(format!("%b = weight \"b\" : {dtype}[{o}]"));
        // A cast to the dtype that a value already has is no op.
        let a = if dtype == "f32" { "x" } else { "a" };
        if a == "a" {
            line(format!("%a = toperator.cast %x {{to = \"{dtype}\"}}"));
        }
        line(format!("%n = toperator.rms_norm %{a}, %g {{eps = 1e-24}}"));
        line("%s = toperator.silu %n".into());
        let s = if is_e4m3 { "q" } else { "s" };
        if is_e4m3 {
            line("%q = toperator.cast %s {to = \"e4m3\"}".into());
        }
        let history = if kt > 1 { ", history=%h" } else { "" };
        let scale = if is_e4m3 { ", w_scale=%w.scale" } else { "" };
        let pad = match (kh, self.step) {
            (3, 1) => ", pad_after = 1, pad_before = 1",
            (3, _) => ", pad_after = 1",
            _ => "",
        };
        let stride = format!("[1, {0}, {0}]", self.step);
        if kt > 1 {
            line("%h = cache.read @past".into());
        }
        line(format!(
            "%c = toperator.conv3d %{s}, %w, bias=%b{history}{scale} {{kernel = [{kt}, {kh}, {kw}]{pad}, stride = {stride}}}"
        ));
        let result = if self.has_residual() {
            line(format!("%r = toperator.add %c, %{a}"));
            "r"
        } else {
            "c"
        };
        if a == "a" {
            line(format!("%y = toperator.cast %{result} {{to = \"f32\"}}"));
        }
        line(format!("output \"y\", %{}", if a == "a" { "y" } else { result }));
        line(format!("%last = toperator.take_rows %{s} {{row = {}, rows = 2}}", t - 2));
        line("cache.write @past, %last".into());
        p + "}\n"
    }

    fn inputs(&self) -> Inputs {
        BTreeMap::from([("x", self.input())])
    }

    fn input(&self) -> Vec<f32> {
        let mut x = vec![0.0; self.size.iter().product()];
        fill_normals(DrawKey { seed: 7, chunk: 0, draw: 0 }, 0, &mut x);
        x
    }
}

/// Writes the weights of a convolution in a dtype, with their scales in e4m3.
fn weight_lines(dtype: &str, [rows, columns]: [usize; 2]) -> Vec<String> {
    if dtype != "e4m3" {
        return vec![format!("%w = weight \"w\" : {dtype}[{rows}, {columns}]")];
    }
    vec![
        format!("%w = weight \"w\" {{load = \"conv.e4m3\"}} : e4m3[{rows}, {columns}]"),
        format!("%w.scale = weight \"w\" {{load = \"conv.e4m3.scale\"}} : f32[{rows}]"),
    ]
}

/// The inputs of a call, by name.
type Inputs = BTreeMap<&'static str, Vec<f32>>;

/// Runs a program twice, so that the second run reads a history, and returns the output of the second.
fn run_twice(backend: &mut dyn Backend, text: &str, inputs: &Inputs) -> Vec<f32> {
    let program = Arc::new(parse_all(text, "frames").unwrap().remove(0));
    let loaded =
        backend.load(&program, &dedicated_slots(&program), &mut SyntheticWeights::default()).unwrap();
    let inputs = inputs.iter().map(|(name, x)| (*name, x.as_slice())).collect();
    let call = CallData { inputs, ..CallData::default() };
    for _ in 0..2 {
        backend.run(loaded, &call, &mut NoObserver).unwrap();
    }
    backend.output("y").unwrap().to_vec()
}

fn run_on_cpu(text: &str, x: &Inputs) -> Vec<f32> {
    let program = parse_all(text, "frames").unwrap().remove(0);
    let seat = MeshRank { mesh: program.mesh, rank: first_rank(&program) };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let pool = Pool::new(threads).unwrap();
    run_twice(&mut CpuBackend::new(seat, pool, Vec::new(), Duration::from_secs(1)), text, x)
}

fn run_on_gpu(found: &GpuDiscovery, text: &str, x: &Inputs) -> Vec<f32> {
    let program = parse_all(text, "frames").unwrap().remove(0);
    let options = CudaOptions {
        device_index: 0,
        kernel_cache: None,
        peer_timeout: Duration::from_secs(5),
        setup_timeout: Duration::from_secs(20),
        host_id: 0,
        masked_features: masked_features().unwrap(),
        thread_rank: None,
    };
    let seat = MeshRank { mesh: program.mesh, rank: first_rank(&program) };
    run_twice(&mut CudaBackend::open(&found.libraries, seat, Vec::new(), options).unwrap(), text, x)
}

/// Returns the rank that runs a program, whose role names at most a place on the axis tp.
fn first_rank(program: &Program) -> Rank {
    let place = program.role.rsplit_once("@tp").map(|(_, at)| at.parse().unwrap());
    Rank(place.unwrap_or(0))
}

/// Returns ‖found − wanted‖ / ‖wanted‖.
fn relative_error(found: &[f32], wanted: &[f32]) -> f64 {
    assert_eq!(found.len(), wanted.len());
    let square = |x: f64| x * x;
    let pairs = || found.iter().zip(wanted).map(|(f, w)| (f64::from(*f), f64::from(*w)));
    (pairs().map(|(f, w)| square(f - w)).sum::<f64>() / pairs().map(|(_, w)| square(w)).sum::<f64>()).sqrt()
}

const CUBE: [usize; 3] = [3, 3, 3];

const CASES: [Case; 12] = [
    // The shapes of the decoder at sizes that no tile divides, and a few channels.
    Case { size: [2, 37, 45, 96], out: 96, kernel: CUBE, step: 1 },
    Case { size: [2, 19, 21, 192], out: 192, kernel: CUBE, step: 1 },
    Case { size: [2, 9, 17, 384], out: 384, kernel: CUBE, step: 1 },
    Case { size: [2, 17, 33, 192], out: 96, kernel: [1, 3, 3], step: 1 },
    Case { size: [2, 17, 33, 96], out: 3, kernel: CUBE, step: 1 },
    Case { size: [2, 11, 13, 192], out: 384, kernel: [1, 1, 1], step: 1 },
    Case { size: [2, 11, 13, 192], out: 384, kernel: [3, 1, 1], step: 1 },
    Case { size: [2, 16, 32, 96], out: 96, kernel: [1, 3, 3], step: 2 },
    Case { size: [2, 11, 13, 16], out: 16, kernel: [1, 1, 1], step: 1 },
    Case { size: [2, 11, 13, 16], out: 40, kernel: CUBE, step: 1 },
    // Channels that TMA cannot load, which the plain kernel convolves.
    Case { size: [2, 21, 23, 3], out: 96, kernel: CUBE, step: 1 },
    Case { size: [2, 7, 9, 12], out: 12, kernel: CUBE, step: 1 },
];

/// A machine without a GPU checks the programs at least.
#[test]
fn every_program_is_well_formed() {
    for case in CASES {
        let e4m3 = case.fits_e4m3().then_some("e4m3");
        for dtype in ["f32", "bf16"].into_iter().chain(e4m3) {
            assert_eq!(parse_all(&case.program(dtype), "frames").unwrap().len(), 1, "{case:?}");
        }
    }
    for is_bf16 in [false, true] {
        assert_eq!(parse_all(&attention_program([4, 4, 40], is_bf16), "frames").unwrap().len(), 1);
    }
}

#[test]
fn convolutions_in_bf16_and_e4m3_match_f32() {
    let Some(found) = find_gpu() else { return };
    for case in CASES {
        let x = case.inputs();
        let wanted = run_on_cpu(&case.program("f32"), &x);
        let (half, single) =
            (run_on_gpu(&found, &case.program("bf16"), &x), run_on_gpu(&found, &case.program("f32"), &x));
        let errors = (relative_error(&half, &wanted), relative_error(&single, &wanted));
        println!("{case:?}: {:.1e} in bf16, {:.1e} in f32", errors.0, errors.1);
        assert!(errors.0 < 1e-2 && errors.1 < 1e-5, "{case:?}: {errors:?}");
        if case.fits_e4m3() {
            // Two operands with 3 bits behind the leading one, each with a relative error of 2.6 %.
            let error = relative_error(&run_on_gpu(&found, &case.program("e4m3"), &x), &wanted);
            println!("{case:?}: {error:.1e} in e4m3");
            assert!((1e-3..6e-2).contains(&error), "{case:?}: {error}");
        }
    }
}

/// A rank that holds fewer rows must compute the same bits.
#[test]
fn a_cell_has_the_same_bits_in_a_frame_of_any_height() {
    let Some(found) = find_gpu() else { return };
    let whole = Case { size: [2, 48, 45, 96], out: 96, kernel: CUBE, step: 1 };
    let part = Case { size: [2, 20, 45, 96], ..whole };
    let frame = |case: Case| case.size[1] * case.size[2] * case.size[3];
    let x = whole.input();
    let top: Vec<f32> = x.chunks(frame(whole)).flat_map(|f| &f[..frame(part)]).copied().collect();
    for dtype in ["bf16", "e4m3"] {
        let all = run_on_gpu(&found, &whole.program(dtype), &BTreeMap::from([("x", x.clone())]));
        let some = run_on_gpu(&found, &part.program(dtype), &BTreeMap::from([("x", top.clone())]));
        // The last row of the part has zeros below it.
        let inner = frame(part) - 45 * 96;
        for (whole_frame, part_frame) in all.chunks(frame(whole)).zip(some.chunks(frame(part))) {
            let pairs = whole_frame[..inner].iter().zip(&part_frame[..inner]);
            assert_eq!(pairs.filter(|(a, b)| a != b).count(), 0, "{dtype}");
        }
    }
}

/// Writes a convolution of frames with a history: of whole pictures, or of one of two shards of their rows.
fn shard_program(case: Case, shard: Option<u32>, dtype: &str) -> String {
    let ([t, h, w, c], [kt, kh, kw], o, step) = (case.size, case.kernel, case.out, case.step);
    let past = kt - 1;
    let (head, rows) = match shard {
        None => (String::new(), String::new()),
        Some(at) => (format!(" role(r@tp{at}) mesh(tp=2)"), " {tp: shard(1)}".to_string()),
    };
    let mut inputs = vec![("x", format!("f32[{t}, {h}, {w}, {c}]{rows}"))];
    if past > 0 {
        inputs.push(("history", format!("f32[{past}, {h}, {w}, {c}]{rows}")));
    }
    if shard.is_some() {
        inputs.push(("halo", format!("f32[{}, 2, {w}, {c}] {{tp: shard(1)}}", past + t)));
    }
    let mut p = format!("program @p{head} {{\n");
    let mut line = |text: String| writeln!(p, "{text}").unwrap();
    // A cast to the dtype that a value already has is no op.
    let is_cast = dtype != "f32";
    let value = |name: &str| if is_cast { format!("%{name}.cast") } else { format!("%{name}") };
    for (name, ty) in &inputs {
        line(format!("%{name} = input : {ty}"));
        if is_cast {
            line(format!("%{name}.cast = ttile.cast %{name} {{to = \"{dtype}\"}}"));
        }
    }
    weight_lines(dtype, [o, kt * kh * kw * c]).into_iter().for_each(&mut line);
    let is_e4m3 = dtype == "e4m3";
    line(format!("%b = weight \"b\" : {}[{o}]", if is_e4m3 { "bf16" } else { dtype }));
    let scale = is_e4m3.then(|| ", w_scale=%w.scale".to_string());
    let keyed = inputs[1..].iter().map(|(name, _)| format!(", {name}={}", value(name)));
    let keyed: String = keyed.chain(scale).collect();
    let pad = if step == 1 { "pad_after = 1, pad_before = 1" } else { "pad_after = 1" };
    line(format!(
        "%y = ttile.conv3d {}, %w, bias=%b{keyed} {{kernel = [{kt}, {kh}, {kw}], {pad}, stride = [1, {step}, {step}]}}",
        value("x")
    ));
    if is_cast {
        line("%y.f32 = ttile.cast %y {to = \"f32\"}".into());
    }
    line(format!("output \"y\", %{}", if is_cast { "y.f32" } else { "y" }));
    p += "}\n";
    if shard.is_none() { p.replace("ttile", "toperator") } else { p }
}

/// The shards of a picture with their halo, whose result must have the bits of the whole picture.
const SHARDED_CASES: [Case; 5] = [
    Case { size: [2, 22, 45, 96], out: 96, kernel: CUBE, step: 1 },
    Case { size: [1, 14, 33, 384], out: 384, kernel: CUBE, step: 1 },
    Case { size: [2, 40, 33, 192], out: 96, kernel: [1, 3, 3], step: 1 },
    Case { size: [2, 18, 32, 96], out: 96, kernel: [1, 3, 3], step: 2 },
    // Channels that TMA cannot load, which the plain kernel convolves.
    Case { size: [2, 10, 9, 12], out: 12, kernel: CUBE, step: 1 },
];

/// The frames of a picture, with some before them.
struct Picture {
    cells: Vec<f32>,
    height: usize,
    /// Elements of a row.
    row: usize,
}

impl Picture {
    /// Returns some rows of some frames; a row outside of the picture is zeros.
    fn rows(&self, frames: Range<usize>, rows: &[isize]) -> Vec<f32> {
        let line = |f: usize, r: isize| match usize::try_from(r).ok().filter(|r| *r < self.height) {
            Some(r) => self.cells[(f * self.height + r) * self.row..][..self.row].to_vec(),
            None => vec![0.0; self.row],
        };
        frames.flat_map(|f| rows.iter().flat_map(move |r| line(f, *r))).collect()
    }

    /// Returns the inputs of a rank that holds these rows, given the frames of the history.
    fn inputs(&self, past: usize, rows: Range<usize>) -> Inputs {
        let frames = self.cells.len() / self.height / self.row;
        let own: Vec<isize> = rows.clone().map(|r| r as isize).collect();
        let beside = [rows.start as isize - 1, rows.end as isize];
        let history = (past > 0).then(|| ("history", self.rows(0..past, &own)));
        let halo = (rows.len() < self.height).then(|| ("halo", self.rows(0..frames, &beside)));
        [Some(("x", self.rows(past..frames, &own))), history, halo].into_iter().flatten().collect()
    }
}

#[test]
fn shards_with_a_halo_have_the_bits_of_the_whole_picture() {
    let found = find_gpu();
    for part in SHARDED_CASES {
        let [t, h, w, c] = part.size;
        let (past, out_row, out_rows) = (part.kernel[0] - 1, w / part.step * part.out, h / part.step);
        let whole = Case { size: [t, 2 * h, w, c], ..part };
        let with_past = Case { size: [past + t, 2 * h, w, c], ..part };
        let picture = Picture { cells: with_past.input(), height: 2 * h, row: w * c };
        for dtype in ["f32", "bf16"].into_iter().chain(part.fits_e4m3().then_some("e4m3")) {
            let texts = [None, Some(0), Some(1)]
                .map(|shard| shard_program(if shard.is_none() { whole } else { part }, shard, dtype));
            for text in &texts {
                parse_all(text, "frames").unwrap_or_else(|d| panic!("{d:#?}\n{text}"));
            }
            let Some(found) = &found else { continue };
            let all = run_on_gpu(found, &texts[0], &picture.inputs(past, 0..2 * h));
            for at in 0..2 {
                let got = run_on_gpu(found, &texts[at + 1], &picture.inputs(past, at * h..(at + 1) * h));
                let part_of = |frame: &[f32]| frame[at * out_rows * out_row..][..out_rows * out_row].to_vec();
                let wanted: Vec<f32> = all.chunks(2 * out_rows * out_row).flat_map(part_of).collect();
                let differing = got.iter().zip(&wanted).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                assert_eq!((got.len(), differing), (wanted.len(), 0), "{part:?} {dtype} shard {at}");
            }
        }
    }
}

fn attention_program([h, w, c]: [usize; 3], is_bf16: bool) -> String {
    // A cast to the dtype that a value already has is no op.
    let (cast, q) = if is_bf16 { ("%q = toperator.cast %x {to = \"bf16\"}", "q") } else { ("", "x") };
    let (back, y) = if is_bf16 { ("%y = toperator.cast %o {to = \"f32\"}", "y") } else { ("", "o") };
    format!(
        "program @p {{ %x = input : f32[1, {h}, {w}, {c}] %g = weight \"norm.weight\" : f32[{c}] {cast} \
         %k = toperator.rms_norm %{q}, %g {{eps = 1e-6}} %v = toperator.silu %{q} \
         %o = toperator.attention %{q}, %k, %v {{head_dim = {c}}} {back} output \"y\", %{y} }}"
    )
}

#[test]
fn attention_within_a_frame_in_bf16_matches_f32() {
    let Some(found) = find_gpu() else { return };
    for [h, w, c] in [[9, 17, 384], [5, 13, 96], [20, 31, 32], [4, 4, 40]] {
        let case = Case { size: [1, h, w, c], out: c, kernel: CUBE, step: 1 };
        let x = case.inputs();
        let wanted = run_on_cpu(&attention_program([h, w, c], false), &x);
        let error = relative_error(&run_on_gpu(&found, &attention_program([h, w, c], true), &x), &wanted);
        println!("{h} x {w} x {c}: {error:.1e} in bf16");
        assert!(error < 1e-2, "{h} x {w} x {c}: {error}");
    }
}
