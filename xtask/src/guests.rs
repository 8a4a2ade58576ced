//! The table of guests × modes.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use hotspare_torture::dice::Dice;
use hotspare_torture::guests::{Conditions, Guest, Mode, Outcome, read_list, run};

use crate::pool::side_by_side;
use crate::{call, tree};

#[derive(Debug, Args)]
pub struct GuestArguments {
    /// Only these guests
    #[arg(long = "guest", value_name = "NAME")]
    guests: Vec<String>,
    /// Only these modes: plain, capture-restore, increments, failover, switchover
    #[arg(long = "mode", value_name = "MODE", value_parser = mode)]
    modes: Vec<Mode>,
    /// How often each
    #[arg(long, default_value_t = 1)]
    times: u64,
    /// How many at once
    #[arg(long, default_value_t = 4)]
    jobs: usize,
    /// Repeats the instants of an earlier run
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Rounds of a guest
    #[arg(long, default_value_t = 60)]
    steps: u32,
    /// Length of a round
    #[arg(long, default_value_t = 50)]
    step_ms: u32,
}

impl Default for GuestArguments {
    fn default() -> GuestArguments {
        let (guests, modes) = (vec![], vec![]);
        GuestArguments { guests, modes, times: 1, jobs: 16, seed: 1, steps: 60, step_ms: 50 }
    }
}

fn mode(name: &str) -> Result<Mode> {
    let names = Mode::ALL.map(Mode::name).join(", ");
    Mode::by_name(name).with_context(|| format!("there are: {names}"))
}

struct Job {
    guest: Guest,
    mode: Mode,
    seed: u64,
}

#[derive(Default)]
struct Score {
    passed: u64,
    failed: u64,
    too_short: u64,
}

/// Runs the table; its last line is `N passed, N failed`.
pub fn guests(arguments: &GuestArguments) -> Result<()> {
    let (passed, failed) = table(arguments)?;
    println!("{passed} passed, {failed} failed");
    ensure!(failed == 0 && passed > 0, "{failed} runs of guests failed");
    Ok(())
}

/// Runs the table and prints it; how many runs passed and failed.
pub fn table(arguments: &GuestArguments) -> Result<(u64, u64)> {
    let build = tree::target().join("guests");
    let mut make = Command::new("make");
    make.args(["--silent", "-j2", "-C", "guests"]).arg(format!("BUILD={}", build.display()));
    call(make)?;
    let modes =
        if arguments.modes.is_empty() { Mode::ALL.to_vec() } else { arguments.modes.clone() };
    let conditions = Conditions {
        build,
        hotspare: hotspare(&modes)?,
        steps: arguments.steps,
        step_ms: arguments.step_ms,
    };
    let guests = chosen(&arguments.guests)?;
    let jobs = jobs(&guests, &modes, arguments);
    let a_round = jobs.len() as u64 / arguments.times.max(1);
    let scores = Mutex::new(BTreeMap::<(String, Mode), Score>::new());
    side_by_side(arguments.jobs, jobs, |job| work(job, &scores, &conditions, a_round));
    let scores = scores.into_inner().unwrap_or_default();
    print_table(&guests, &modes, &scores);
    let too_short: u64 = scores.values().map(|score| score.too_short).sum();
    if too_short > 0 {
        println!("{too_short} lives were over before the guest could be moved: done again, longer");
    }
    let passed = scores.values().map(|score| score.passed).sum();
    let failed = scores.values().map(|score| score.failed).sum();
    Ok((passed, failed))
}

/// The program, built if a mode needs it.
fn hotspare(modes: &[Mode]) -> Result<Option<PathBuf>> {
    if modes == [Mode::Plain] {
        return Ok(None);
    }
    tree::build_hotspare().map(Some)
}

fn chosen(names: &[String]) -> Result<Vec<Guest>> {
    let list = fs::read_to_string("guests/list.toml").context("read guests/list.toml")?;
    let mut guests = read_list(&list);
    if let Some(name) = names.iter().find(|name| !guests.iter().any(|g| g.name == **name)) {
        bail!("there is no guest {name}; see guests/README.md");
    }
    guests.retain(|guest| names.is_empty() || names.contains(&guest.name));
    Ok(guests)
}

fn jobs(guests: &[Guest], modes: &[Mode], arguments: &GuestArguments) -> Vec<Job> {
    let dice = Dice::new(arguments.seed);
    let mut jobs = Vec::new();
    for round in 0..arguments.times {
        for (row, guest) in guests.iter().enumerate() {
            for (column, mode) in modes.iter().enumerate() {
                if guest.unsupported.iter().any(|(refused, _)| refused == mode) {
                    continue;
                }
                let number = (round << 32) + ((row as u64) << 8) + column as u64;
                let seed = dice.part(number).roll();
                jobs.push(Job { guest: guest.clone(), mode: *mode, seed });
            }
        }
    }
    jobs
}

/// Does one and scores it; says after each `a_round` how many there have been.
fn work(
    job: Job,
    scores: &Mutex<BTreeMap<(String, Mode), Score>>,
    conditions: &Conditions,
    a_round: u64,
) {
    let Job { guest, mode, seed } = job;
    let outcome = run(&guest, mode, conditions, seed);
    let outcome = outcome
        .unwrap_or_else(|error| Outcome { wrong: Some(error.to_string()), ..Outcome::default() });
    if let Some(wrong) = &outcome.wrong {
        println!("FAILED {} {} (seed {seed}): {wrong}\n", guest.name, mode.name());
    }
    if let Ok(mut scores) = scores.lock() {
        let score = scores.entry((guest.name, mode)).or_default();
        *if outcome.wrong.is_none() { &mut score.passed } else { &mut score.failed } += 1;
        score.too_short += u64::from(outcome.too_short);
        let failed: u64 = scores.values().map(|score| score.failed).sum();
        let done = failed + scores.values().map(|score| score.passed).sum::<u64>();
        if done.is_multiple_of(a_round) {
            eprintln!("round {} is over: {done} runs, {failed} failed", done / a_round);
        }
    }
}

fn print_table(guests: &[Guest], modes: &[Mode], scores: &BTreeMap<(String, Mode), Score>) {
    let width = guests.iter().map(|guest| guest.name.len()).max().unwrap_or(5);
    let header: String = modes.iter().map(|mode| format!(" {:>15}", mode.name())).collect();
    println!("{:<width$}{header}", "guest");
    for guest in guests {
        let cell = |mode: &Mode| match scores.get(&(guest.name.clone(), *mode)) {
            Some(Score { passed, failed, .. }) => {
                format!(" {:>15}", format!("{passed}/{}", passed + failed))
            }
            None => format!(" {:>15}", "-"),
        };
        println!("{:<width$}{}", guest.name, modes.iter().map(cell).collect::<String>());
    }
}
