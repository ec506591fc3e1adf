//! `tessera-storm --seeds 10000 [--from 0] [--plant NAME] [--trace]`: runs so many storms and prints what must never
//! happen and did. Exit status 1 then, 2 on a wrong argument. With `--plant` it is the other way round: the bug must
//! be found.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Instant;

use tessera_storm::{Case, Plant, run};

const USAGE: &str = "usage: tessera-storm [--seeds N] [--from SEED] [--plant NAME|all] [--trace]";
/// Violations that are shown; more are counted alone.
const SHOWN: usize = 8;

struct Arguments {
    seeds: u64,
    from: u64,
    plants: Vec<Plant>,
    trace: bool,
}

fn main() -> ExitCode {
    let args = match arguments() {
        Ok(args) => args,
        Err(why) => {
            eprintln!("{why}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let good =
        if args.plants.is_empty() { storms(&args) } else { args.plants.iter().all(|p| found(&args, *p)) };
    ExitCode::from(u8::from(!good))
}

fn arguments() -> Result<Arguments, String> {
    let mut out = Arguments { seeds: 10_000, from: 0, plants: Vec::new(), trace: false };
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
            "--plant" if value == "all" => out.plants = Plant::ALL.to_vec(),
            "--plant" => {
                let plant = Plant::ALL.into_iter().find(|p| p.name() == value);
                let names: Vec<&str> = Plant::ALL.iter().map(|p| p.name()).collect();
                out.plants
                    .push(plant.ok_or_else(|| format!("no bug `{value}`: there are {}", names.join(", ")))?);
            }
            _ => return Err(format!("{name} is not known")),
        }
    }
    Ok(out)
}

/// Whether nothing happened that must not.
fn storms(args: &Arguments) -> bool {
    let start = Instant::now();
    let (mut wrong, mut events, mut finished) = (0, 0, 0);
    let mut ends: BTreeMap<String, u64> = BTreeMap::new();
    for seed in args.from..args.from.saturating_add(args.seeds) {
        let case = Case::random(seed);
        let mut print = |line: String| println!("{line}");
        let outcome = run(&case, None, args.trace.then_some(&mut print as &mut dyn FnMut(String)));
        events += outcome.events;
        finished += u64::from(outcome.finished);
        if let Some((class, _)) = outcome.failure {
            *ends.entry(class.words().to_string()).or_default() += 1;
        }
        if !outcome.violations.is_empty() {
            wrong += 1;
            if wrong <= SHOWN {
                println!("seed {seed}: {case:?}");
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

/// Whether a bug is found.
fn found(args: &Arguments, plant: Plant) -> bool {
    for seed in args.from..args.from.saturating_add(args.seeds) {
        let outcome = run(&Case::random(seed), Some(plant), None);
        if let Some(v) = outcome.violations.first() {
            println!("{}: found by seed {seed}, {}: {}", plant.name(), v.rule, v.text);
            return true;
        }
    }
    println!("{}: not found in {} storms", plant.name(), args.seeds);
    false
}
