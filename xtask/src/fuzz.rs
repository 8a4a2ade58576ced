//! Damaged streams against the decoder.

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use hotspare_replica::fuzz::{decoder, one};

#[derive(Debug, Args)]
pub struct FuzzArguments {
    /// For how long
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// The first case; each case adds one
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Repeats the one case of this seed
    #[arg(long)]
    case: Option<u64>,
}

/// Runs the decoder on damaged streams; a failure panics and names its seed.
pub fn fuzz(arguments: &FuzzArguments) -> Result<()> {
    if let Some(case) = arguments.case {
        let (is_refused, committed) = one(case);
        println!("case {case}: refused {is_refused}, {committed} checkpoints committed");
        return Ok(());
    }
    let report = decoder(arguments.seed, Duration::from_secs(arguments.seconds));
    let (refused, committed) = (report.refused, report.committed);
    println!(
        "{} damaged streams, {refused} refused, {committed} checkpoints committed",
        report.cases
    );
    println!("{} passed, 0 failed", report.cases);
    Ok(())
}
