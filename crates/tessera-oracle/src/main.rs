//! `tessera-oracle --sets 100000 --seed 1 [--keep DIR]`: compares the verifier with the
//! simulation on many random sets of programs and prints a table. The exit status is 1 if they
//! disagree and 2 on an invalid argument.

#![forbid(unsafe_code)]

mod verifier;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use tessera_oracle::{ComparisonTable, Disagreement, ProgramSet, compare_set, shrink_set, to_filetest};

const USAGE: &str = "usage: tessera-oracle [--sets N] [--seed N] [--from INDEX] [--keep DIR]";
/// Maximum number of disagreements of one kind that are shrunk and printed; further ones are only
/// counted.
const SHOWN: usize = 8;

struct Arguments {
    sets: u32,
    seed: u64,
    from: u32,
    keep: Option<PathBuf>,
}

fn main() -> ExitCode {
    match parse_arguments().and_then(|a| run_sets(&a)) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(1),
        Err(why) => {
            eprintln!("{why}\n{USAGE}");
            ExitCode::from(2)
        }
    }
}

fn parse_arguments() -> Result<Arguments, String> {
    let mut out = Arguments { sets: 100_000, seed: 1, from: 0, keep: None };
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        let value = args.next().ok_or_else(|| format!("{name} needs a value"))?;
        let wrong = |_| format!("{name} {value}: not a whole number");
        match name.as_str() {
            "--sets" => out.sets = value.parse().map_err(wrong)?,
            "--seed" => out.seed = value.parse().map_err(wrong)?,
            "--from" => out.from = value.parse().map_err(wrong)?,
            "--keep" => out.keep = Some(PathBuf::from(&value)),
            _ => return Err(format!("unknown option {name}")),
        }
    }
    Ok(out)
}

/// Compares the verifier with the simulation on the requested sets and prints the table. Returns
/// the number of sets on which they disagree.
fn run_sets(args: &Arguments) -> Result<u64, String> {
    let mut table = ComparisonTable::new();
    let mut wrong = 0;
    let mut shown: BTreeMap<Disagreement, usize> = BTreeMap::new();
    let start = Instant::now();
    for index in args.from..args.from.saturating_add(args.sets) {
        let set = ProgramSet::generate_random(args.seed, index);
        let programs = set.lower_programs().map_err(|e| format!("set {index} cannot be built: {e}"))?;
        let found = compare_set(&set.mesh, &programs, &verifier::verify_programs);
        let Some(violation) = table.add_comparison(&set, &found) else { continue };
        wrong += 1;
        let shown = shown.entry(violation).or_default();
        if *shown < SHOWN {
            *shown += 1;
            show_disagreement(args, index, &set, violation)?;
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    print!("{}", table.to_text());
    let rate = |n: u64| n as f64 / seconds;
    println!("\n{seconds:.1} s, {:.0} sets/s, {:.0} programs/s", rate(table.sets), rate(table.programs));
    if wrong > 0 {
        println!("{wrong} sets on which verifier and simulation disagree");
    }
    Ok(wrong)
}

fn show_disagreement(
    a: &Arguments,
    index: u32,
    set: &ProgramSet,
    violation: Disagreement,
) -> Result<(), String> {
    let small = shrink_set(set, &verifier::verify_programs);
    let programs = small.lower_programs()?;
    let found = compare_set(&small.mesh, &programs, &verifier::verify_programs);
    let what = match violation {
        Disagreement::AcceptedFails => "accepted, but fails".to_string(),
        Disagreement::RejectedCompletes(code) => format!("rejected by {code}, but completes"),
    };
    let text = to_filetest(&programs, &found, &format!("seed {} set {index}: {what}", a.seed));
    println!("{text}");
    let Some(dir) = &a.keep else { return Ok(()) };
    let path = dir.join(format!("seed{}_set{index}.tir", a.seed));
    let kept = std::fs::create_dir_all(dir).and_then(|()| std::fs::write(&path, text));
    kept.map_err(|e| format!("{}: {e}", path.display()))
}
