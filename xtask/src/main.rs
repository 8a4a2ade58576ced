//! The one door: `cargo xtask …`.
#![forbid(unsafe_code)]

mod bench;
mod campaign;
mod ci;
mod connections;
mod fuzz;
mod guests;
mod kills;
mod pool;
mod simulate;
mod tidy;
mod torture;
mod tree;

use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};

/// Builds, checks and measures Hotspare.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Installs what demo and tests need
    Setup,
    /// Checks the rules of STYLE.md that a machine can check
    Tidy,
    /// Everything that must pass before a change lands
    Ci(ci::CiArguments),
    /// Runs every program of guests/ in every mode
    Guests(guests::GuestArguments),
    /// Kills real programs at random instants
    Kills(kills::KillArguments),
    /// Kills, cuts off and stops hosts of a server again and again, whose clients must not notice
    Campaign(campaign::CampaignArguments),
    /// Runs scenarios: faults at their times or at random ones, as files of `scenarios/` tell them
    Torture(torture::TortureArguments),
    /// Fails over under clients that look at what becomes of their connections
    Connections(connections::ConnectionArguments),
    /// Runs clusters in simulated time, with faults at random instants
    Simulate(simulate::SimulateArguments),
    /// Damages streams and feeds them to the decoder
    Fuzz(fuzz::FuzzArguments),
    /// Measures
    #[command(subcommand)]
    Bench(bench::Bench),
}

fn main() -> ExitCode {
    match run(Arguments::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<()> {
    std::env::set_current_dir(tree::root()).context("enter the source tree")?;
    match task {
        Task::Setup => call(Command::new("scripts/setup")),
        Task::Tidy => tidy::tidy(),
        Task::Ci(arguments) => ci::ci(&arguments),
        Task::Guests(arguments) => guests::guests(&arguments),
        Task::Kills(arguments) => kills::kills(&arguments),
        Task::Campaign(arguments) => campaign::campaign(&arguments),
        Task::Torture(arguments) => torture::torture(&arguments),
        Task::Connections(arguments) => connections::connections(&arguments),
        Task::Simulate(arguments) => simulate::simulate(&arguments),
        Task::Fuzz(arguments) => fuzz::fuzz(&arguments),
        Task::Bench(bench) => bench::bench(&bench),
    }
}

/// Runs a program; anything but success is an error.
fn call(mut command: Command) -> Result<()> {
    let status = command.status().with_context(|| format!("run {command:?}"))?;
    if !status.success() {
        bail!("{command:?}: {status}");
    }
    Ok(())
}
