//! `cargo xtask bench failover`.

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use hotspare_torture::bench::{
    FailoverBench, FailoverResult, PauseBench, Spread, Victim, failover,
};

use super::{Table, finish, provenance, wrapped};
use crate::tree;

#[derive(Debug, Args)]
pub struct FailoverArguments {
    /// Numbers of keys
    #[arg(long, value_delimiter = ',', default_value = "1000,10000,100000,1000000,10000000")]
    keys: Vec<u64>,
    /// Who dies: the primary's `host` without a word, the `agent` (`hotspare run`), the `guest`
    #[arg(long, value_name = "host|agent|guest", value_delimiter = ',', default_value = "host")]
    dies: Vec<Victim>,
    /// The guarantee
    #[arg(long, default_value = "timeline", value_parser = ["timeline", "output-commit"])]
    guarantee: String,
    /// Kills of each
    #[arg(long, default_value_t = 10)]
    count: usize,
    /// Milliseconds between two checkpoints
    #[arg(long, default_value_t = 100)]
    epoch_ms: u64,
    /// Requests a second, a tenth of them writes; a client of `output-commit` does not get more
    /// than a few hundred answered on each of its eight connections
    #[arg(long, default_value_t = 1000.0)]
    rate: f64,
    /// Puts the table into docs/benchmarks.md
    #[arg(long)]
    write: bool,
}

/// Kills and prints what it took.
pub fn failovers(arguments: &FailoverArguments) -> Result<()> {
    let hotspare = tree::build_hotspare()?;
    let mut table = Table::new(&[
        "keys",
        "dies",
        "times",
        "clients wait",
        "detect",
        "apply",
        "finalise",
        "address",
        "requests failed",
    ]);
    for &keys in &arguments.keys {
        for &victim in &arguments.dies {
            let bed = PauseBench {
                hotspare: Some(hotspare.clone()),
                spare: true,
                more: vec!["--guarantee".into(), arguments.guarantee.clone()],
                keys,
                writes: 0.1,
                rate_per_s: arguments.rate,
                epoch: Duration::from_millis(arguments.epoch_ms),
                length: Duration::from_secs(1),
            };
            let bench = FailoverBench { bed, victim };
            let results = (0..arguments.count).map(|_| Ok(failover(&bench)?));
            row(&mut table, keys, victim, &results.collect::<Result<Vec<_>>>()?);
        }
    }
    let about = format!(
        "Redis, values of 72 bytes, `--guarantee {}`, under {} requests a second on 8 connections, \
         a tenth of them writes. Clients wait: the longest time without any reply around the \
         death. Detect begins with the last sign of life. ms, p50 / p99 / max.",
        arguments.guarantee, arguments.rate
    );
    let text = format!("{}\n{}\n{}", provenance()?, wrapped(&about), table.text);
    let place = match arguments.guarantee.as_str() {
        "timeline" => "failover",
        _ => "unnoticed failover",
    };
    finish(place, &text, arguments.write)
}

fn row(table: &mut Table, keys: u64, victim: Victim, results: &[FailoverResult]) {
    let spread = |part: fn(&FailoverResult) -> f64| {
        let Spread { p50, p99, max, .. } = Spread::of(results.iter().map(part).collect());
        format!("{p50:.1} / {p99:.1} / {max:.1}")
    };
    table.row([
        keys.to_string(),
        victim.to_string(),
        results.len().to_string(),
        spread(|one| one.outage_ms),
        spread(|one| one.failover.detect_ms),
        spread(|one| one.failover.apply_ms),
        spread(|one| one.failover.finalise_ms),
        spread(|one| one.failover.address_ms),
        results.iter().map(|one| one.failed).sum::<usize>().to_string(),
    ]);
}
