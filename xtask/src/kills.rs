//! Kills at random instants over all real programs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use hotspare_torture::dice::Dice;
use hotspare_torture::programs::{
    Change, Program, build_examples, by_name, missing_commands, programs, run_with_change,
};

use crate::pool::side_by_side;
use crate::tree;

#[derive(Debug, Args)]
pub struct KillArguments {
    /// How many
    #[arg(long, default_value_t = 22)]
    count: u64,
    /// Decides the seeds of all runs
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Takes this very seed for every run, to repeat one
    #[arg(long)]
    exact_seed: Option<u64>,
    /// Moves the programs as planned instead of killing their hosts: nothing may be lost, no
    /// connection may break
    #[arg(long)]
    switchover: bool,
    /// Kills hosts under `--guarantee output-commit`: nothing that a client knows may be lost, no
    /// connection may break
    #[arg(long, conflicts_with = "switchover")]
    unnoticed: bool,
    /// Only these programs
    #[arg(long = "program", value_name = "NAME")]
    programs: Vec<String>,
    /// Milliseconds between two checkpoints
    #[arg(long, default_value_t = 100)]
    epoch_ms: u64,
    /// How many at once; outages are longer then
    #[arg(long, default_value_t = 1)]
    jobs: usize,
}

impl Default for KillArguments {
    /// Each program once, two at a time.
    fn default() -> KillArguments {
        let count = programs().len() as u64;
        KillArguments {
            count,
            seed: 1,
            exact_seed: None,
            switchover: false,
            unnoticed: false,
            programs: vec![],
            epoch_ms: 100,
            jobs: 2,
        }
    }
}

impl KillArguments {
    /// Each program moved once, as planned.
    pub fn moves() -> KillArguments {
        KillArguments { switchover: true, ..KillArguments::default() }
    }

    /// Each program killed once with all output held.
    pub fn unnoticed() -> KillArguments {
        KillArguments { unnoticed: true, ..KillArguments::default() }
    }

    fn change(&self) -> Change {
        match (self.switchover, self.unnoticed) {
            (true, _) => Change::Planned,
            (false, true) => Change::UnnoticedDeath,
            (false, false) => Change::Death,
        }
    }
}

/// Kills and prints; the last line is `N passed, N failed`.
pub fn kills(arguments: &KillArguments) -> Result<()> {
    let (passed, failed) = all(arguments)?;
    println!("{passed} passed, {failed} failed");
    let what = if arguments.switchover { "moves" } else { "kills" };
    ensure!(failed == 0 && passed > 0, "{failed} of {} {what} were not survived", arguments.count);
    Ok(())
}

/// Kills and prints; how many were survived and not.
pub fn all(arguments: &KillArguments) -> Result<(u64, u64)> {
    let binary = tree::build_hotspare()?;
    build_examples().context("build the examples")?;
    let chosen = chosen(&arguments.programs)?;
    let dice = Dice::new(arguments.seed);
    let epoch = Duration::from_millis(arguments.epoch_ms);
    let change = arguments.change();
    let passed = AtomicU64::new(0);
    side_by_side(arguments.jobs, 0..arguments.count, |number| {
        let program = &chosen[(number % chosen.len() as u64) as usize];
        let seed = arguments.exact_seed.unwrap_or_else(|| dice.part(number).roll());
        match run_with_change(program, seed, binary.clone(), epoch, change) {
            Ok(run) => {
                println!("{run}");
                passed.fetch_add(u64::from(run.is_good()), Ordering::Relaxed);
            }
            Err(error) => println!("{:<15} seed {seed:<20} FAILED {error}", program.name),
        }
    });
    let passed = passed.into_inner();
    Ok((passed, arguments.count - passed))
}

fn chosen(names: &[String]) -> Result<Vec<Program>> {
    let chosen = if names.is_empty() {
        programs()
    } else {
        let find = |name: &String| {
            let known: Vec<_> = programs().iter().map(|program| program.name).collect();
            by_name(name).with_context(|| format!("no program {name}; there are {known:?}"))
        };
        names.iter().map(find).collect::<Result<_>>()?
    };
    for program in &chosen {
        let missing = missing_commands(program);
        ensure!(missing.is_empty(), "{} needs {missing:?}: run `make setup`", program.name);
    }
    Ok(chosen)
}
