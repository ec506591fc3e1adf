//! `tessera-storm --seeds 10000 [--from 0] [--bug NAME] [--trace]`: runs that many storms and
//! prints violated invariants. The exit status is 1 if an invariant was violated and 2 on an
//! invalid argument. With `--bug` the exit status is 0 only if the storms find the bug.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Instant;

use tessera_storm::{InjectedBug, Scenario, run_scenario};

const USAGE: &str = "usage: tessera-storm [--seeds N] [--from SEED] [--bug NAME|all] [--trace]";
/// Maximum number of violating scenarios that are printed; further ones are only counted.
const SHOWN: usize = 8;

struct Arguments {
    seeds: u64,
    from: u64,
    bugs: Vec<InjectedBug>,
    trace: bool,
}

fn main() -> ExitCode {
    let args = match parse_arguments() {
        Ok(args) => args,
        Err(why) => {
            eprintln!("{why}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let good =
        if args.bugs.is_empty() { run_storms(&args) } else { args.bugs.iter().all(|p| finds_bug(&args, *p)) };
    ExitCode::from(u8::from(!good))
}

fn parse_arguments() -> Result<Arguments, String> {
    let mut out = Arguments { seeds: 10_000, from: 0, bugs: Vec::new(), trace: false };
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        if name == "--trace" {
            out.trace = true;
            continue;
        }
        let value = args.next().ok_or_else(|| format!("{name} needs a value"))?;
        let wrong = |_| format!("{name} {value}: not a whole number");
        match name.as_str() {
            "--seeds" => out.seeds = value.parse().map_err(wrong)?,
            "--from" => out.from = value.parse().map_err(wrong)?,
            "--bug" if value == "all" => out.bugs = InjectedBug::iter_all().collect(),
            "--bug" => {
                let bug = InjectedBug::iter_all().find(|p| p.name() == value);
                let names: Vec<&str> = InjectedBug::iter_all().map(InjectedBug::name).collect();
                out.bugs.push(
                    bug.ok_or_else(|| format!("unknown bug `{value}`; known bugs: {}", names.join(", ")))?,
                );
            }
            _ => return Err(format!("unknown option {name}")),
        }
    }
    Ok(out)
}

/// Runs the storms and returns whether no invariant was violated.
fn run_storms(args: &Arguments) -> bool {
    let start = Instant::now();
    let (mut wrong, mut events, mut finished) = (0, 0, 0);
    let mut ends: BTreeMap<String, u64> = BTreeMap::new();
    for seed in args.from..args.from.saturating_add(args.seeds) {
        let scenario = Scenario::from_seed(seed);
        let mut print = |line: String| println!("{line}");
        let outcome =
            run_scenario(&scenario, None, args.trace.then_some(&mut print as &mut dyn FnMut(String)));
        events += outcome.events;
        finished += u64::from(outcome.finished);
        if let Some((class, _)) = outcome.failure {
            *ends.entry(class.as_str().to_string()).or_default() += 1;
        }
        if !outcome.violations.is_empty() {
            wrong += 1;
            if wrong <= SHOWN {
                println!("seed {seed}: {scenario:?}");
                for v in &outcome.violations {
                    println!("  {} at {:.3} s: {}", v.rule, v.at_ns as f64 / 1e9, v.text);
                }
            }
        }
    }
    println!(
        "{} storms, {events} events, {finished} finished, {wrong} with violations, in {:.1} s",
        args.seeds,
        start.elapsed().as_secs_f64()
    );
    for (class, n) in ends {
        println!("{n:>8} ended because {class}");
    }
    wrong == 0
}

/// Runs storms with a bug until one finds it, and returns whether one did.
fn finds_bug(args: &Arguments, bug: InjectedBug) -> bool {
    for seed in args.from..args.from.saturating_add(args.seeds) {
        let outcome = run_scenario(&Scenario::from_seed(seed), Some(bug), None);
        if let Some(v) = outcome.violations.first() {
            println!("{}: found by seed {seed}, {}: {}", bug.name(), v.rule, v.text);
            return true;
        }
    }
    println!("{}: not found in {} storms", bug.name(), args.seeds);
    false
}
