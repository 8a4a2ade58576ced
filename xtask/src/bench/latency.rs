//! `cargo xtask bench latency`.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use hotspare_torture::bench::{LatencyBench, LatencyResult, Met, SERVERS, latency};
use hotspare_torture::programs::build_examples;

use super::{Table, finish, provenance, wrapped};
use crate::tree;

#[derive(Debug, Args)]
pub struct LatencyArguments {
    /// Only these servers
    #[arg(long = "server", value_parser = SERVERS)]
    servers: Vec<String>,
    /// Connections of the steady and of the highest load
    #[arg(long, default_value_t = 64)]
    connections: usize,
    /// Milliseconds between two checkpoints where output does not want one sooner
    #[arg(long, default_value_t = 100)]
    epoch_ms: u64,
    /// Seconds measured for each load
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// How often everything is measured
    #[arg(long, default_value_t = 1)]
    rounds: usize,
    /// Leaves out `timeline`
    #[arg(long)]
    no_timeline: bool,
    /// Puts the table into docs/benchmarks.md
    #[arg(long)]
    write: bool,
}

/// Measures each server unprotected, protected, and unprotected again.
pub fn latencies(arguments: &LatencyArguments) -> Result<()> {
    let hotspare = tree::build_hotspare()?;
    build_examples().context("build the examples")?;
    let mut table = Table::new(&[
        "server",
        "guarantee",
        "seldom: ms mean / p50 / p99 / max",
        "half load: ms mean / p50 / p99 / max",
        "half load: replies/s",
        "saturated: replies/s",
        "loss",
        "saturated: ms p50 / p99",
        "agents' CPU %",
    ]);
    let mut parts = Table::quiet(&[
        "server",
        "guarantee",
        "checkpoints/s",
        "commit ms",
        "pause",
        "stop",
        "registers",
        "scan",
        "objects",
        "copy",
        "resume",
        "bytes",
    ]);
    let chosen = |server: &&&'static str| {
        arguments.servers.is_empty() || arguments.servers.iter().any(|name| name == **server)
    };
    for server in SERVERS.iter().filter(chosen) {
        for _ in 0..arguments.rounds {
            rows(&mut table, &mut parts, server, &hotspare, arguments)?;
        }
    }
    let about = format!(
        "Values and pages of 64 bytes, half of the requests to stores are writes; a checkpoint at \
         the latest every {} ms. Seldom: one connection, 50 requests a second. Half load: {} \
         connections at a steady rate, half of what the unprotected server did just before. \
         Saturated: as many connections, each as fast as replies come. Latency counts from when a \
         request was due, under the highest load from when it was sent. Each server is measured \
         unprotected before and after; loss is against \
         the mean of both. Every reply is checked. Clients, server, both agents and the ghost \
         share the processors.",
        arguments.epoch_ms, arguments.connections
    );
    println!("\n{}", parts.text);
    let text = format!(
        "{}\n{}\n{}\nCheckpoints under the highest load, p50 / p99; pause and parts in µs, \
         commit from the stop of the guest until it is acknowledged:\n\n{}",
        provenance()?,
        wrapped(&about),
        table.text,
        parts.text
    );
    finish("latency", &text, arguments.write)
}

fn rows(
    table: &mut Table,
    parts: &mut Table,
    server: &'static str,
    hotspare: &Path,
    arguments: &LatencyArguments,
) -> Result<()> {
    let measure = |guarantee: Option<&str>, unprotected_per_s| {
        let words = |guarantee: &str| vec!["--guarantee".to_owned(), guarantee.to_owned()];
        let bench = LatencyBench {
            server,
            protection: guarantee.map(|guarantee| (hotspare.to_owned(), words(guarantee))),
            connections: arguments.connections,
            unprotected_per_s,
            epoch: Duration::from_millis(arguments.epoch_ms),
            length: Duration::from_secs(arguments.seconds),
        };
        latency(&bench).with_context(|| format!("measure {server}"))
    };
    let before = measure(None, None)?;
    let all = before.saturated.replies_per_s;
    let committed = measure(Some("output-commit"), Some(all))?;
    let timeline = match arguments.no_timeline {
        true => None,
        false => Some(measure(Some("timeline"), Some(all))?),
    };
    let after = measure(None, Some(all))?;
    let mean = (all + after.saturated.replies_per_s) / 2.0;
    row(table, server, "none, before", &before, None);
    row(table, server, "output-commit", &committed, Some(mean));
    parts.row(parts_of(server, "output-commit", &committed.saturated));
    if let Some(timeline) = timeline {
        row(table, server, "timeline", &timeline, Some(mean));
        parts.row(parts_of(server, "timeline", &timeline.saturated));
    }
    row(table, server, "none, after", &after, None);
    Ok(())
}

fn row(
    table: &mut Table,
    server: &str,
    guarantee: &str,
    result: &LatencyResult,
    unprotected: Option<f64>,
) {
    let four = |met: &Met| {
        let all = met.latency_ms;
        format!("{:.2} / {:.2} / {:.2} / {:.1}", all.mean, all.p50, all.p99, all.max)
    };
    let saturated = &result.saturated;
    let loss = unprotected.map(|all| (1.0 - saturated.replies_per_s / all) * 100.0);
    table.row([
        server.to_owned(),
        guarantee.to_owned(),
        four(&result.seldom),
        four(&result.half),
        format!("{:.0}", result.half.replies_per_s),
        format!("{:.0}", saturated.replies_per_s),
        loss.map_or_else(String::new, |loss| format!("{loss:.0} %")),
        format!("{:.2} / {:.2}", saturated.latency_ms.p50, saturated.latency_ms.p99),
        format!("{:.0}", saturated.agents * 100.0),
    ]);
}

fn parts_of(server: &str, guarantee: &str, met: &Met) -> Vec<String> {
    let names = [
        "pause_us",
        "stop_us",
        "registers_us",
        "scan_us",
        "objects_us",
        "copy_us",
        "resume_us",
        "bytes",
    ];
    let two = |name: &str, digits: usize| {
        let spread = met.epochs.get(name).copied().unwrap_or_default();
        format!("{:.digits$} / {:.digits$}", spread.p50, spread.p99)
    };
    let mut cells = vec![server.to_owned(), guarantee.to_owned()];
    cells.push(format!("{:.0}", met.epochs_per_s));
    cells.push(two("commit_ms", 2));
    cells.extend(names.iter().map(|name| two(name, 0)));
    cells
}
