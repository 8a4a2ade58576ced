//! Clusters in simulated time, with faults at random instants.

use anyhow::Result;
use clap::Args;

use crate::call;
use crate::tree::cargo;

#[derive(Debug, Args)]
pub struct SimulateArguments {
    /// How many seeds
    #[arg(long, default_value_t = 1_000)]
    seeds: u64,
    /// Only this seed
    #[arg(long)]
    seed: Option<u64>,
    /// Claims whose name contains this
    #[arg(default_value = "anything_may_happen")]
    claim: String,
}

/// Runs the simulation of `cluster`; a failure prints its seed and what happened.
pub fn simulate(arguments: &SimulateArguments) -> Result<()> {
    let mut test = cargo(&["test", "--release", "-p", "hotspare-cluster", "--test", "simulation"]);
    test.env("HOTSPARE_SEEDS", arguments.seeds.to_string());
    if let Some(seed) = arguments.seed {
        test.env("HOTSPARE_SEED", seed.to_string());
    }
    test.args([&arguments.claim, "--", "--nocapture"]);
    call(test)
}
