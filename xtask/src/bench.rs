//! Measurements, as tables. Nothing is asserted about them.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, Subcommand};
use hotspare_torture::bench::{PauseBench, PauseResult, Spread, failover, pause};

use crate::tree;

/// The parts of a pause, in the order of their happening.
const PARTS: [&str; 6] =
    ["stop_us", "scan_us", "copy_us", "registers_us", "objects_us", "resume_us"];

#[derive(Debug, Subcommand)]
pub enum Bench {
    /// How long checkpoints stop a Redis, over its size and load
    Pause(PauseArguments),
    /// How long a takeover takes, part by part, over the size of a Redis
    Failover(FailoverArguments),
}

#[derive(Debug, Args)]
pub struct PauseArguments {
    /// Numbers of keys
    #[arg(long, value_delimiter = ',', default_value = "1000,10000,100000,1000000,10000000")]
    keys: Vec<u64>,
    /// Milliseconds between two checkpoints
    #[arg(long, default_value_t = 100)]
    epoch_ms: u64,
    /// Seconds measured for each line
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Requests a second of the steady load; throughput is measured apart from it
    #[arg(long, default_value_t = 20_000.0)]
    rate: f64,
    /// Leaves out the mode that stops and copies everything
    #[arg(long)]
    no_stop_and_copy: bool,
}

/// Runs a measurement and prints its table.
pub fn bench(bench: &Bench) -> Result<()> {
    match bench {
        Bench::Pause(arguments) => pauses(arguments),
        Bench::Failover(arguments) => failovers(arguments),
    }
}

fn pauses(arguments: &PauseArguments) -> Result<()> {
    let hotspare = tree::build_hotspare()?;
    println!(
        "Redis, values of 72 bytes, a checkpoint every {} ms. Pauses in µs: p50 / p99 / max; parts \
         are medians.\nThroughput: closed loop on 8 connections, unprotected and protected.\n",
        arguments.epoch_ms
    );
    println!("RSS: most resident memory of `hotspare run` / `spare`, guest and ghost aside.\n");
    println!("{}", header());
    for keys in &arguments.keys {
        for writes in [0.1, 0.5] {
            line("hotspare", *keys, writes, &hotspare, vec![], arguments)?;
            if !arguments.no_stop_and_copy {
                let more = vec!["--stop-and-copy".to_owned()];
                line("stop-and-copy", *keys, writes, &hotspare, more, arguments)?;
            }
        }
    }
    Ok(())
}

#[derive(Debug, Args)]
pub struct FailoverArguments {
    /// Numbers of keys
    #[arg(long, value_delimiter = ',', default_value = "1000,10000,100000,1000000,10000000")]
    keys: Vec<u64>,
    /// Kills of each
    #[arg(long, default_value_t = 20)]
    count: usize,
    /// Milliseconds between two checkpoints
    #[arg(long, default_value_t = 100)]
    epoch_ms: u64,
    /// Requests a second, a tenth of them writes
    #[arg(long, default_value_t = 5000.0)]
    rate: f64,
}

fn failovers(arguments: &FailoverArguments) -> Result<()> {
    let hotspare = tree::build_hotspare()?;
    println!("Takeovers of Redis, values of 72 bytes; ms: p50 / p99 / max\n");
    println!("{:>9} {:>6} {:>24} {:>24} {:>24}", "keys", "kills", "detect", "finalise", "address");
    for keys in &arguments.keys {
        let bench = PauseBench {
            hotspare: Some(hotspare.clone()),
            more: vec![],
            keys: *keys,
            writes: 0.1,
            rate_per_s: Some(arguments.rate),
            epoch: Duration::from_millis(arguments.epoch_ms),
            length: Duration::from_secs(1),
        };
        let kills = (0..arguments.count).map(|_| Ok(failover(&bench)?));
        let kills = kills.collect::<Result<Vec<_>>>()?;
        let spread = |values: Vec<f64>| {
            let Spread { p50, p99, max, .. } = Spread::of(values);
            format!("{p50:.1} / {p99:.1} / {max:.1}")
        };
        let detect = spread(kills.iter().map(|kill| kill.detect_ms).collect());
        let finalise = spread(kills.iter().map(|kill| kill.finalise_ms).collect());
        let address = spread(kills.iter().map(|kill| kill.address_ms).collect());
        println!("{keys:>9} {:>6} {detect:>24} {finalise:>24} {address:>24}", kills.len());
    }
    Ok(())
}

fn header() -> String {
    let parts: String =
        PARTS.iter().map(|part| format!(" {:>9}", part.trim_end_matches("_us"))).collect();
    format!(
        "{:<14} {:>9} {:>6} {:>24}{parts} {:>11} {:>9} {:>9} {:>6} {:>11}",
        "mode", "keys", "writes", "pause", "bytes/epoch", "plain/s", "under/s", "loss", "RSS MB"
    )
}

fn line(
    name: &str,
    keys: u64,
    writes: f64,
    hotspare: &std::path::Path,
    more: Vec<String>,
    arguments: &PauseArguments,
) -> Result<()> {
    let run = |hotspare: Option<PathBuf>, rate_per_s: Option<f64>| -> Result<PauseResult> {
        let bench = PauseBench {
            hotspare,
            more: more.clone(),
            keys,
            writes,
            rate_per_s,
            epoch: Duration::from_millis(arguments.epoch_ms),
            length: Duration::from_secs(arguments.seconds),
        };
        Ok(pause(&bench)?)
    };
    let steady = run(Some(hotspare.to_owned()), Some(arguments.rate))?;
    let unprotected = run(None, None)?.replies_per_s;
    let protected = run(Some(hotspare.to_owned()), None)?.replies_per_s;
    let spread = |name: &str| steady.epochs.get(name).copied().unwrap_or_default();
    let Spread { p50, p99, max, .. } = spread("pause_us");
    let parts: String = PARTS.iter().map(|part| format!(" {:>9.0}", spread(part).p50)).collect();
    println!(
        "{name:<14} {keys:>9} {:>5.0}% {:>24}{parts} {:>11.0} {unprotected:>9.0} {protected:>9.0} \
         {:>5.1}% {:>11}",
        writes * 100.0,
        format!("{p50:.0} / {p99:.0} / {max:.0}"),
        spread("bytes").p50,
        (1.0 - protected / unprotected) * 100.0,
        format!("{:.0} / {:.0}", steady.primary_rss_mb, steady.spare_rss_mb)
    );
    Ok(())
}
