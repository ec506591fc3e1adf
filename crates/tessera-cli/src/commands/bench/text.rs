//! `tessera bench text`: measures how fast a GPU runs the text encoder of Wan.

use std::path::PathBuf;

use tessera::DtypePolicy;
use tessera_tools::bench::{TextBenchConfig, TextTiming, median_and_deciles, time_text_encoder};

use super::BenchDevice;
use crate::flags::mapping::DTYPES;
use crate::flags::named_values;
use crate::output::{CliResult, OutputFormat, write_stdout};

const EXAMPLES: &str = "\
Examples:
  tessera bench text                                         UMT5-XXL in bf16, 512 tokens, on the first GPU
  tessera bench text --length 60 --trace                     a prompt of 60 tokens, and the time of each kind of launch
  tessera bench text --layers 2 --dtype f32 --runs 5         a quick test

Weights are random, so no download is needed. A run begins with the ids of a prompt in host memory and ends with its rows there.";

/// Measure the time of the text encoder UMT5-XXL for one prompt, on one GPU
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct TextArgs {
    /// Folder with the config of a video model, which states the number of tokens; weights are not
    /// read
    #[arg(default_value = "models/wan2.1-14b")]
    pub model: PathBuf,

    /// Compute dtype of matmuls and of the activations that they produce
    #[arg(long, value_parser = named_values(DTYPES), default_value = "bf16")]
    pub dtype: DtypePolicy,

    /// Number of layers to run; few layers make a quick test [default: all]
    #[arg(long, value_name = "N")]
    pub layers: Option<u64>,

    /// Number of tokens of the prompt; the others are padding, which all layers but their attention
    /// compute too [default: all]
    #[arg(long, value_name = "N")]
    pub length: Option<u64>,

    /// Number of runs to measure
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub runs: usize,

    /// Number of runs before those that are measured
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub warm: usize,

    /// After the runs, trace N of them, and print the time of each kind of launch [default N: 5]
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "5", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub trace: Option<u32>,

    /// Rate of matmuls at which the GPU could run at best, for the floor, in TFLOP/s
    #[arg(long, value_name = "N", default_value_t = 790.0)]
    pub peak_tflops: f64,

    /// Rate at which the GPU could read weights at best, for the floor, in TB/s
    #[arg(long, value_name = "N", default_value_t = 4.2)]
    pub peak_tbs: f64,

    /// Device that runs the encoder; there is no benchmark on CPU cores
    #[arg(long, default_value = "cuda")]
    pub device: BenchDevice,

    /// Format of the measurements and of diagnostics
    #[arg(long, value_enum, default_value_t)]
    pub format: OutputFormat,
}

/// Times the encoder and prints the result.
pub fn run(args: &TextArgs) -> CliResult {
    let timing = time_text_encoder(&TextBenchConfig {
        model: args.model.clone(),
        dtype: args.dtype,
        layers: args.layers,
        length: args.length,
        runs: (args.warm, args.runs.max(1)),
        traces: args.trace.unwrap_or(0) as usize,
    })?;
    let rates = Rates::new(&timing, (args.peak_tflops, args.peak_tbs));
    write_stdout(&match args.format {
        OutputFormat::Json => format!("{}\n", to_json(args, &timing, &rates)),
        OutputFormat::Text => render_text(args, &timing, &rates),
    })?;
    Ok(0)
}

/// What follows from the times and from the rates of the GPU.
#[derive(Debug, PartialEq)]
struct Rates {
    p50_ms: f64,
    p99_ms: f64,
    tflops: f64,
    tbs: f64,
    /// The least time of the matmuls, and that of reading the weights, in milliseconds.
    floors_ms: (f64, f64),
}

impl Rates {
    fn new(timing: &TextTiming, (peak_tflops, peak_tbs): (f64, f64)) -> Rates {
        let mut sorted = timing.runs_ms.clone();
        sorted.sort_by(f64::total_cmp);
        let at = ((sorted.len() as f64 * 0.99).ceil() as usize).clamp(1, sorted.len().max(1)) - 1;
        let (p50_ms, p99_ms) = (median_and_deciles(&sorted).0, sorted.get(at).copied().unwrap_or_default());
        let (work, bytes) = (timing.flops as f64 / 1e12, timing.weight_bytes as f64 / 1e12);
        Rates {
            p50_ms,
            p99_ms,
            tflops: work * 1e3 / p50_ms,
            tbs: bytes * 1e3 / p50_ms,
            floors_ms: (work / peak_tflops * 1e3, bytes / peak_tbs * 1e3),
        }
    }
}

fn to_json(args: &TextArgs, timing: &TextTiming, rates: &Rates) -> serde_json::Value {
    let launches: Vec<serde_json::Value> = timing
        .launches
        .iter()
        .map(|l| serde_json::json!({"launch": l.launch, "us": l.ms * 1e3, "count": l.count}))
        .collect();
    serde_json::json!({
        "bench": "text",
        "facts": {
            "dtype": args.dtype.name(), "rows": timing.rows.0, "length": timing.rows.1, "plan": timing.plan,
            "flops": timing.flops, "weight_bytes": timing.weight_bytes, "device_bytes": timing.device_bytes,
            "load_s": timing.load.0, "first_run_ms": timing.load.1,
        },
        "p50_ms": rates.p50_ms, "p99_ms": rates.p99_ms, "tflops": rates.tflops, "tbs": rates.tbs,
        "floor_matmul_ms": rates.floors_ms.0, "floor_weights_ms": rates.floors_ms.1,
        "runs_ms": timing.runs_ms, "launches": launches,
    })
}

fn render_text(args: &TextArgs, timing: &TextTiming, rates: &Rates) -> String {
    let (matmul_ms, weights_ms) = rates.floors_ms;
    let (rows, length) = timing.rows;
    let mut text = format!(
        "UMT5-XXL in {}, {length} of {rows} tokens\n  \
         a prompt takes {:.2} ms (p99 {:.2}, {} runs): {:.0} TFLOP/s, weights at {:.2} TB/s\n  \
         floor {:.2} ms: matmuls {matmul_ms:.2} ms at {} TFLOP/s, weights {weights_ms:.2} ms at {} TB/s\n  \
         memory {:.2} GiB of weights, {:.2} GiB of temporaries; loaded after {:.1} s, first run {:.1} ms\n",
        args.dtype.name(),
        rates.p50_ms,
        rates.p99_ms,
        timing.runs_ms.len(),
        rates.tflops,
        rates.tbs,
        matmul_ms.max(weights_ms),
        args.peak_tflops,
        args.peak_tbs,
        super::to_gib(timing.device_bytes[0]),
        super::to_gib(timing.device_bytes[2]),
        timing.load.0,
        timing.load.1,
    );
    if !timing.launches.is_empty() {
        text += &super::format_launches("launch", &timing.launches);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_floors_follow_from_the_work() {
        let timing = TextTiming {
            plan: String::new(),
            rows: (512, 512),
            runs_ms: (1..=200).rev().map(|i| f64::from(i) / 10.0).collect(),
            flops: 4_850_000_000_000,
            weight_bytes: 9_260_000_000,
            device_bytes: [0; 3],
            load: (0.0, 0.0),
            launches: Vec::new(),
        };
        let rates = Rates::new(&timing, (790.0, 4.2));
        assert!((rates.p50_ms - 10.1).abs() < 0.11 && (rates.p99_ms - 19.8).abs() < 1e-9, "{rates:?}");
        assert!((rates.tflops - 4850.0 / rates.p50_ms).abs() < 1e-6, "{rates:?}");
        assert!((rates.floors_ms.0 - 6.139).abs() < 1e-3 && (rates.floors_ms.1 - 2.205).abs() < 1e-3);
    }
}
