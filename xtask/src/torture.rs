//! Scenarios of faults over real programs.

mod file;
mod tally;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use hotspare_torture::campaign::Plan;
use hotspare_torture::dice::Dice;
use hotspare_torture::programs::{build_examples, by_name, missing_commands};
use hotspare_torture::scenario::minimise::minimise;
use hotspare_torture::scenario::{Report, Scenario, run};

use self::tally::Tally;
use crate::campaign::build_checker;
use crate::tree;

#[derive(Clone, Debug, Args)]
pub struct TortureArguments {
    /// Scenarios: see `scenarios/`
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Another seed than theirs
    #[arg(long)]
    seed: Option<u64>,
    /// Only these of their programs
    #[arg(long = "program", value_name = "NAME")]
    programs: Vec<String>,
    /// Runs them again and again with new seeds, and begins none after so many seconds
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,
    /// Looks for the smallest scenario that still fails, for so many seconds at most
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "900")]
    minimise: Option<u64>,
    /// How often a smaller scenario may succeed before it counts as one that does not fail
    #[arg(long, default_value_t = 2)]
    tries: u32,
    /// Gives up after so many failures
    #[arg(long, default_value_t = 3)]
    failures: u64,
    /// A program whose gate lets replies out too early, to see that this is found
    #[arg(long)]
    broken_gate: bool,
    /// Where logs and pictures go
    #[arg(long)]
    logs: Option<PathBuf>,
}

/// What CI does.
pub fn smoke() -> Result<(u64, u64)> {
    let files =
        ["smoke", "smoke-wire"].map(|name| tree::root().join(format!("scenarios/{name}.toml")));
    let arguments = TortureArguments {
        files: files.to_vec(),
        seed: None,
        programs: Vec::new(),
        seconds: None,
        minimise: None,
        tries: 1,
        failures: 3,
        broken_gate: false,
        logs: None,
    };
    let tally = all(&arguments)?;
    println!("\n{tally}");
    Ok(tally.passed_and_failed())
}

/// Runs them and prints; the last line is `N passed, N failed`.
pub fn torture(arguments: &TortureArguments) -> Result<()> {
    let tally = all(arguments)?;
    let (passed, failed) = tally.passed_and_failed();
    println!("\n{tally}");
    println!("{passed} passed, {failed} failed");
    ensure!(failed == 0 && passed > 0, "{failed} scenarios broke an invariant");
    Ok(())
}

fn all(arguments: &TortureArguments) -> Result<Tally> {
    let read = |file: &PathBuf| file::read(file);
    let scenarios: Vec<Scenario> = arguments.files.iter().map(read).collect::<Result<_>>()?;
    build_examples().context("build the examples")?;
    let binary = match arguments.broken_gate {
        true => tree::build_hotspare_broken()?,
        false => tree::build_hotspare()?,
    };
    let logs = arguments.logs.clone().unwrap_or_else(|| tree::target().join("torture"));
    let mut plan = Plan::new(binary, logs);
    plan.checker = Some(build_checker()?);
    let (begun, mut tally) = (Instant::now(), Tally::default());
    let is_late = || arguments.seconds.is_some_and(|most| begun.elapsed().as_secs() >= most);
    for turn in 0_u64.. {
        for (number, scenario) in scenarios.iter().enumerate() {
            let mut scenario = scenario.clone();
            scenario.seed = arguments.seed.unwrap_or(scenario.seed);
            if turn > 0 {
                let seed = Dice::new(scenario.seed).part(turn << 8 | number as u64).roll();
                // As TOML can say it.
                scenario.seed = seed >> 1;
            }
            if is_late() || tally.passed_and_failed().1 >= arguments.failures {
                return Ok(tally);
            }
            in_each(arguments, &scenario, &plan, (turn, &mut tally))?;
        }
        if arguments.seconds.is_none() {
            break;
        }
    }
    Ok(tally)
}

/// Runs a scenario with each of its programs; in later turns with one of them.
fn in_each(
    arguments: &TortureArguments,
    scenario: &Scenario,
    plan: &Plan,
    (turn, tally): (u64, &mut Tally),
) -> Result<()> {
    let is_wanted = |name: &&&str| {
        let wanted = &arguments.programs;
        wanted.is_empty() || wanted.iter().any(|wanted| name.starts_with(wanted.as_str()))
    };
    let programs: Vec<&str> = scenario.programs.iter().filter(is_wanted).copied().collect();
    let turns = if turn > 0 { 1 } else { programs.len() };
    for program in programs.iter().cycle().skip(turn as usize % programs.len().max(1)).take(turns) {
        let report = once(scenario, program, plan)?;
        println!("{report:#}");
        tally.add(&report);
        if !report.is_good() && !report.is_void {
            if let Some(seconds) = arguments.minimise {
                find_smallest(arguments, scenario, program, plan, Duration::from_secs(seconds))?;
            }
            if tally.passed_and_failed().1 >= arguments.failures {
                break;
            }
        }
    }
    Ok(())
}

fn once(scenario: &Scenario, name: &str, plan: &Plan) -> Result<Report> {
    let program = by_name(name).context("a known program")?;
    let missing = missing_commands(&program);
    ensure!(missing.is_empty(), "{name} needs {missing:?}: run `make setup`");
    let logs = plan.logs.join(format!("{}-{name}-{}", scenario.name, scenario.seed));
    std::fs::create_dir_all(&logs).with_context(|| format!("make {}", logs.display()))?;
    let drawn = file::write(&scenario.with(&scenario.draw()), "what was drawn");
    std::fs::write(logs.join("scenario.toml"), drawn).context("keep the scenario")?;
    Ok(run(scenario, program, plan, &logs)?)
}

/// Prints the smallest scenario that has failed.
fn find_smallest(
    arguments: &TortureArguments,
    scenario: &Scenario,
    program: &str,
    plan: &Plan,
    at_most: Duration,
) -> Result<()> {
    let begun = Instant::now();
    let mut plan = plan.clone();
    plan.logs = plan.logs.join("minimise");
    let mut trouble = None;
    let mut fails = |candidate: &Scenario| {
        for _ in 0..arguments.tries {
            if begun.elapsed() > at_most {
                return None;
            }
            match once(candidate, program, &plan) {
                Ok(report) => {
                    let (good, faults) = (report.is_good(), candidate.faults.len());
                    let verdict = if good { "goes well" } else { "fails" };
                    println!(
                        "    {:>5.1} {faults} faults: {verdict}",
                        begun.elapsed().as_secs_f64()
                    );
                    if !good && !report.is_void {
                        return Some(true);
                    }
                }
                Err(error) => {
                    trouble = Some(error);
                    return None;
                }
            }
        }
        Some(false)
    };
    let of_one = Scenario { programs: known(program)?, ..scenario.clone() };
    let minimal = minimise(&of_one, &mut fails);
    if let Some(error) = trouble {
        return Err(error.context("look for a smaller scenario"));
    }
    let (tried, left) = (minimal.tried, minimal.strikes.len());
    let comment = format!("Fails: the smallest of {tried} scenarios made from {}.", scenario.name);
    let text = file::write(&minimal.scenario, &comment);
    let path = plan.logs.join(format!("{}-{program}.toml", scenario.name));
    std::fs::write(&path, &text).with_context(|| format!("write {}", path.display()))?;
    println!("\n{left} faults are left; as a file in {}:\n\n{text}", path.display());
    Ok(())
}

fn known(program: &str) -> Result<Vec<&'static str>> {
    let all = hotspare_torture::campaign::PROGRAMS;
    match all.iter().find(|known| **known == program) {
        Some(known) => Ok(vec![known]),
        None => bail!("no program {program}"),
    }
}
