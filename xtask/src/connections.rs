//! What becomes of client connections at failovers.

use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;
use hotspare_torture::connections::round;
use hotspare_torture::dice::Dice;

use crate::tree;

#[derive(Debug, Args)]
pub struct ConnectionArguments {
    /// How many failovers; every other one over IPv6
    #[arg(long, default_value_t = 200)]
    rounds: u64,
    /// Begins with this one, to repeat it
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Decides the seeds of all rounds
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Fails over, with clients of all kinds; every connection must live on or be reset.
pub fn connections(arguments: &ConnectionArguments) -> Result<()> {
    let binary = tree::build_hotspare()?;
    let dice = Dice::new(arguments.seed);
    let (mut idle, mut busy, mut late, mut failed) = (0, 0, 0, 0);
    let mut resets: Vec<Duration> = Vec::new();
    for number in arguments.first..arguments.first + arguments.rounds {
        let (seed, ipv6) = (dice.part(number).roll(), number % 2 == 1);
        let outcome = round(seed, binary.clone(), ipv6);
        let wrongs = match outcome {
            Ok(outcome) => {
                idle += outcome.idle_alive;
                busy += outcome.busy_alive;
                late += outcome.late_resets;
                resets.extend(&outcome.resets);
                outcome.wrongs
            }
            Err(error) => vec![error.to_string()],
        };
        failed += u64::from(!wrongs.is_empty());
        for wrong in wrongs {
            println!("round {number} (seed {seed}, IPv{}): {wrong}", if ipv6 { 6 } else { 4 });
        }
    }
    resets.sort_unstable();
    println!("{late} connections that began too late for a checkpoint were reset");
    let at = |share: usize| resets.get(resets.len().saturating_sub(1) * share / 100);
    println!("{idle} idle connections served on, {busy} busy ones, {} reset", resets.len());
    println!("reset after the takeover: median {:?}, last {:?}", at(50), at(100));
    let rounds = arguments.rounds;
    println!("{} rounds passed, {failed} failed", rounds - failed);
    ensure!(failed == 0, "{failed} of {rounds} rounds broke a promise");
    ensure!(!resets.is_empty(), "no connection was ahead of its checkpoint: nothing was tried");
    Ok(())
}
