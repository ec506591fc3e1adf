//! `tessera-oracle --programs 100000 --seed 1 [--keep DIR]`: compares the judge with what happens on many random sets
//! of programs and prints what it found. Exit status 1 when they part, 2 on a wrong argument.

mod judge;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use tessera_oracle::{Case, Table, Violation, compare, filetest, shrink};

const USAGE: &str = "usage: tessera-oracle [--programs SETS] [--seed N] [--from INDEX] [--keep DIR]";
/// Disagreements of one kind that are shrunk and shown; more are counted alone.
const SHOWN: usize = 8;

struct Arguments {
    sets: u32,
    seed: u64,
    from: u32,
    keep: Option<PathBuf>,
}

fn main() -> ExitCode {
    match arguments().and_then(|a| run(&a)) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(1),
        Err(why) => {
            eprintln!("{why}\n{USAGE}");
            ExitCode::from(2)
        }
    }
}

fn arguments() -> Result<Arguments, String> {
    let mut out = Arguments { sets: 100_000, seed: 1, from: 0, keep: None };
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        let value = args.next().ok_or_else(|| format!("{name} needs a value"))?;
        let wrong = |_| format!("{name} {value}: not a whole number");
        match name.as_str() {
            "--programs" => out.sets = value.parse().map_err(wrong)?,
            "--seed" => out.seed = value.parse().map_err(wrong)?,
            "--from" => out.from = value.parse().map_err(wrong)?,
            "--keep" => out.keep = Some(PathBuf::from(&value)),
            _ => return Err(format!("{name} is not known")),
        }
    }
    Ok(out)
}

/// How many sets the judge was wrong about.
fn run(args: &Arguments) -> Result<u64, String> {
    let mut table = Table::new();
    let mut wrong = 0;
    let mut shown: BTreeMap<Violation, usize> = BTreeMap::new();
    let start = Instant::now();
    for index in args.from..args.from.saturating_add(args.sets) {
        let case = Case::random(args.seed, index);
        let programs = case.programs().map_err(|e| format!("set {index} cannot be built: {e}"))?;
        let found = compare(&case.mesh, &programs, &judge::judge);
        let Some(violation) = table.add(&case, &found) else { continue };
        wrong += 1;
        let shown = shown.entry(violation).or_default();
        if *shown < SHOWN {
            *shown += 1;
            show(args, index, &case, violation)?;
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    print!("{}", table.show());
    let rate = |n: u64| n as f64 / seconds;
    println!("\n{seconds:.1} s, {:.0} sets/s, {:.0} programs/s", rate(table.sets), rate(table.programs));
    if wrong > 0 {
        println!("{wrong} sets on which judge and run part");
    }
    Ok(wrong)
}

fn show(a: &Arguments, index: u32, case: &Case, violation: Violation) -> Result<(), String> {
    let small = shrink(case, &judge::judge);
    let programs = small.programs()?;
    let found = compare(&small.mesh, &programs, &judge::judge);
    let what = match violation {
        Violation::AcceptedFails => "accepted, but fails".to_string(),
        Violation::RefusedCompletes(code) => format!("refused by {code}, but completes"),
    };
    let text = filetest(&programs, &found, &format!("seed {} set {index}: {what}", a.seed));
    println!("{text}");
    let Some(dir) = &a.keep else { return Ok(()) };
    let path = dir.join(format!("seed{}_set{index}.tir", a.seed));
    let kept = std::fs::create_dir_all(dir).and_then(|()| std::fs::write(&path, text));
    kept.map_err(|e| format!("{}: {e}", path.display()))
}
