//! A campaign of faults: processes that are killed, stopped or paused, cut links, a frozen disk,
//! and flipped bits in weights and caches, drawn from a seed over six layouts.
//!
//! Every fault is a run of real processes. The campaign compares the reports of the run with the
//! fault, and counts what is wrong. It is a result, and no error, if something is.

mod draw;
mod frozen_disk;
mod run;
mod shut_connections;
mod summary;
mod verdict;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use anyhow::ensure;

use crate::BenchResult;
use crate::partition::NetnsPair;
use crate::stream_process::StreamTarget;
use draw::{DrawnFault, FaultKind, Layout};
use frozen_disk::FreezableDisk;
use run::{measure_golden, run_fault};
use verdict::{FaultResult, compare_run};

/// Draw faults of all kinds and compare what each run reports with its fault
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The tessera binary [default: next to this binary]
    #[arg(long, value_name = "FILE")]
    tessera: Option<PathBuf>,

    /// Folder of a video model with a decoder
    #[arg(long, value_name = "DIR", default_value = "models/demo")]
    model: PathBuf,

    /// Number of faults
    #[arg(long, value_name = "N", default_value_t = 60)]
    faults: u32,

    /// Number of the first fault, to repeat a part of a campaign
    #[arg(long, value_name = "N", default_value_t = 0)]
    first: u32,

    /// Seed of all draws
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// Kinds of faults; may be repeated [default: all that this machine allows]
    #[arg(long = "kind", value_enum)]
    kinds: Vec<FaultKind>,

    /// Number of runs at a time
    #[arg(long, value_name = "N", default_value_t = 4)]
    parallel: usize,

    /// Folder that keeps the run folders of faults with a defect
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
}

/// What all runs of a campaign use.
struct Campaign<'a> {
    args: &'a Args,
    target: StreamTarget,
    kinds: Vec<FaultKind>,
    /// Hashes of the latents without a fault, by layout, as far as they were needed.
    goldens: Mutex<BTreeMap<Layout, String>>,
    next: AtomicU32,
    results: Mutex<Vec<FaultResult>>,
}

/// Runs the drawn faults, several at a time, and counts the defects.
pub fn run(args: &Args) -> anyhow::Result<BenchResult> {
    ensure!(args.faults > 0 && args.parallel > 0, "--faults 0 or --parallel 0: nothing to do");
    let target = StreamTarget {
        tessera: args.tessera.clone(),
        model: args.model.clone(),
        prompt: "a red circle moves right".to_string(),
    };
    let mut disks = Vec::new();
    let mut kinds = if args.kinds.is_empty() { FaultKind::ALL.to_vec() } else { args.kinds.clone() };
    kinds.sort();
    kinds.dedup();
    let mut unavailable = Vec::new();
    if kinds.contains(&FaultKind::SlowDisk) {
        match (0..args.parallel).map(|_| FreezableDisk::mount_image()).collect::<anyhow::Result<Vec<_>>>() {
            Ok(mounted) => disks.extend(mounted.into_iter().map(Some)),
            Err(e) => unavailable.push((FaultKind::SlowDisk, format!("{e:#}"))),
        }
    }
    if kinds.iter().any(|k| k.needs_namespaces())
        && let Err(e) = NetnsPair::new("probe")
    {
        let without = kinds.iter().filter(|k| k.needs_namespaces());
        unavailable.extend(without.map(|k| (*k, format!("{e:#}"))));
    }
    kinds.retain(|k| unavailable.iter().all(|(u, _)| u != k));
    ensure!(!kinds.is_empty(), "this machine allows none of the faults: {unavailable:?}");
    let begun = Instant::now();
    let campaign = Campaign {
        args,
        target,
        kinds,
        goldens: Mutex::default(),
        next: AtomicU32::new(args.first),
        results: Mutex::new(Vec::new()),
    };
    disks.resize_with(args.parallel, || None);
    std::thread::scope(|s| {
        for disk in &disks {
            s.spawn(|| campaign.run_faults(disk.as_ref()));
        }
    });
    let mut results = campaign.results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_by_key(|r| r.fault.number);
    let seconds = begun.elapsed().as_secs_f64();
    Ok(summary::summarize_results(args.seed, args.parallel, seconds, &unavailable, &results))
}

impl Campaign<'_> {
    /// Runs faults until all are drawn.
    fn run_faults(&self, disk: Option<&FreezableDisk>) {
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if number - self.args.first >= self.args.faults {
                return;
            }
            let fault = DrawnFault::from_seed(self.args.seed, number, &self.kinds);
            let result = self.run_one(&fault, disk);
            let result = result.unwrap_or_else(|e| FaultResult::from_error(fault, &e));
            eprintln!("{}", summary::describe_result(&result));
            self.results.lock().unwrap_or_else(PoisonError::into_inner).push(result);
        }
    }

    fn run_one(&self, fault: &DrawnFault, disk: Option<&FreezableDisk>) -> anyhow::Result<FaultResult> {
        let run = run_fault(&self.target, fault, disk)?;
        let golden = match fault.kind.is_harmless() || fault.kind == FaultKind::FlippedCache {
            true => self.find_golden(fault.layout)?,
            false => String::new(),
        };
        let result = compare_run(&self.target.binary_path()?, fault, &run, &golden)?;
        if let Some(keep) = self.args.keep.as_ref().filter(|_| !result.defects.is_empty()) {
            std::fs::create_dir_all(keep)?;
            let to = keep.join(fault.number.to_string());
            let copied = std::process::Command::new("cp").arg("-r").arg(run.dir.path()).arg(to).status()?;
            ensure!(copied.success(), "cannot keep {}", run.dir.path().display());
        }
        Ok(result)
    }

    /// Returns the hash of the latents of a run without a fault, which is measured once.
    fn find_golden(&self, layout: Layout) -> anyhow::Result<String> {
        let mut goldens = self.goldens.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(golden) = goldens.get(&layout) {
            return Ok(golden.clone());
        }
        let golden = measure_golden(&self.target, layout)?;
        goldens.insert(layout, golden.clone());
        Ok(golden)
    }
}
