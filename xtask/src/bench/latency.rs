//! `cargo xtask bench latency`.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use hotspare_torture::bench::{LatencyBench, LatencyResult, Met, SERVERS, latency};
use hotspare_torture::programs::build_examples;

use serde_json::json;

use super::against::{Case, Figures, compare};
use super::plot::{Axis, Curve, Panel, Plot};
use super::report::{Common, Report, Table, wrapped};
use crate::tree;

#[derive(Clone, Debug, Args)]
pub struct LatencyArguments {
    #[command(flatten)]
    common: Common,
    /// Only these servers
    #[arg(long = "server", value_parser = SERVERS)]
    servers: Vec<String>,
    /// Connections of the steady and of the highest load
    #[arg(long, default_value_t = 128)]
    connections: usize,
    /// Milliseconds between two checkpoints where output does not want one sooner
    #[arg(long, default_value_t = 100)]
    epoch_ms: u64,
    /// Seconds measured for each load; half of it before and half after without protection
    #[arg(long, default_value_t = 60.0)]
    seconds: f64,
    /// How often everything is measured
    #[arg(long, default_value_t = 1)]
    rounds: usize,
    /// Leaves out `timeline`
    #[arg(long)]
    no_timeline: bool,
}

const COLUMNS: [&str; 9] = [
    "server",
    "guarantee",
    "seldom: ms mean / p50 / p99 / max",
    "half load: ms mean / p50 / p99 / max",
    "half load: replies/s",
    "saturated: replies/s",
    "loss",
    "saturated: ms p50 / p99",
    "agents' CPU %",
];

const COLUMNS_OF_PARTS: [&str; 12] = [
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
];

impl LatencyArguments {
    pub fn with(common: Common) -> LatencyArguments {
        LatencyArguments {
            common,
            servers: vec![],
            connections: 128,
            epoch_ms: 100,
            seconds: 60.0,
            rounds: 1,
            no_timeline: false,
        }
    }

    fn chosen(&self) -> impl Iterator<Item = &'static str> + '_ {
        let all = if self.common.quick { &SERVERS[..1] } else { &SERVERS[..] };
        let named = |server: &&'static str| self.servers.iter().any(|name| name == *server);
        all.iter().copied().filter(move |server| self.servers.is_empty() || named(server))
    }

    /// With loads that fit into the minutes that there are: three for each of the ways a server is
    /// kept, without protection half as long before and after the others, and some seconds more
    /// before each.
    fn fitting(&self) -> LatencyArguments {
        let ways = if self.no_timeline { 2 } else { 3 };
        let servers = self.chosen().count() * self.rounds;
        let labs = (servers * (ways + 1)) as f64;
        let loads = (servers * ways * 3) as f64;
        let seconds = self.common.seconds("latency", self.seconds, loads, labs * 12.0);
        LatencyArguments { seconds, ..self.clone() }
    }

    fn bench(
        &self,
        server: &'static str,
        hotspare: &Path,
        guarantee: Option<&str>,
        unprotected_per_s: Option<f64>,
    ) -> LatencyBench {
        let words = |guarantee: &str| vec!["--guarantee".to_owned(), guarantee.to_owned()];
        let seconds = match guarantee {
            _ if self.common.quick => 0.3,
            // There are two of these.
            None => self.seconds / 2.0,
            Some(_) => self.seconds,
        };
        LatencyBench {
            server,
            protection: guarantee.map(|guarantee| (hotspare.to_owned(), words(guarantee))),
            connections: if self.common.quick { 4 } else { self.connections },
            unprotected_per_s,
            epoch: Duration::from_millis(self.epoch_ms),
            length: Duration::from_secs_f64(seconds),
        }
    }
}

/// Measures each server unprotected, protected, and unprotected again.
pub fn latencies(arguments: &LatencyArguments) -> Result<()> {
    build_examples().context("build the examples")?;
    if let Some(rev) = &arguments.common.against {
        return compare("latency", &arguments.common, rev, &cases(arguments));
    }
    let hotspare = tree::build_hotspare()?;
    let arguments = &arguments.fitting();
    let mut report = Report::new("latency", &arguments.common)?;
    let (mut table, mut parts) = (Table::new(&COLUMNS), Table::quiet(&COLUMNS_OF_PARTS));
    let mut all = Vec::new();
    for server in arguments.chosen() {
        for _ in 0..arguments.rounds {
            for (guarantee, result, loss) in rows(server, &hotspare, arguments)? {
                row(&mut table, server, guarantee, &result, loss);
                if !guarantee.starts_with("none") {
                    parts.row(parts_of(server, guarantee, &result.saturated));
                }
                report.add(json!({ "server": server, "guarantee": guarantee }), &result)?;
                all.push((server, guarantee, result));
            }
        }
    }
    report.plot(plot(&all));
    let about = format!(
        "Values and pages of 64 bytes, half of the requests to stores are writes; a checkpoint at \
         the latest every {} ms. Seldom: one connection, 50 requests a second. Half load: {} \
         connections at a steady rate, half of what the unprotected server did just before. \
         Saturated: as many connections, each as fast as replies come. Latency counts from when a \
         request was due, under the highest load from when it was sent. Each load lasts {} s; \
         each server is measured unprotected before and after, half as long each time; loss is \
         against the mean of both. Every reply is checked. Clients, server, both agents and the \
         ghost share the processors.",
        arguments.epoch_ms, arguments.connections, arguments.seconds
    );
    println!("\n{}", parts.text);
    let text = format!(
        "{}\n{}\nCheckpoints under the highest load, p50 / p99; pause and parts in µs, \
         commit from the stop of the guest until it is acknowledged:\n\n{}",
        wrapped(&about),
        table.text,
        parts.text
    );
    report.finish("latency", &text)
}

/// Unprotected, under each guarantee, unprotected again; with the part of the throughput that is
/// lost.
fn rows(
    server: &'static str,
    hotspare: &Path,
    arguments: &LatencyArguments,
) -> Result<Vec<(&'static str, LatencyResult, Option<f64>)>> {
    let measure = |guarantee: Option<&str>, unprotected_per_s| {
        let bench = arguments.bench(server, hotspare, guarantee, unprotected_per_s);
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
    let mut rows = vec![("none, before", before, None), ("output-commit", committed, Some(mean))];
    rows.extend(timeline.map(|timeline| ("timeline", timeline, Some(mean))));
    rows.push(("none, after", after, None));
    Ok(rows)
}

/// One place for each server.
fn plot(all: &[(&'static str, &'static str, LatencyResult)]) -> Plot {
    let mut servers: Vec<String> = all.iter().map(|(server, ..)| (*server).to_owned()).collect();
    servers.dedup();
    let mut guarantees: Vec<&str> = all.iter().map(|(_, guarantee, _)| *guarantee).collect();
    guarantees.sort_unstable();
    guarantees.dedup();
    let panel = |y: Axis, of: fn(&LatencyResult) -> f64| {
        let curve = |guarantee: &&str| Curve {
            name: (*guarantee).to_owned(),
            points: all
                .iter()
                .filter(|(_, with, _)| with == guarantee)
                .filter_map(|(server, _, result)| {
                    let place = servers.iter().position(|name| name == server)?;
                    Some((place as f64, of(result)))
                })
                .collect(),
        };
        let curves = guarantees.iter().map(curve).collect();
        Panel { x: Axis::names("server", &servers), y, curves }
    };
    Plot {
        name: "servers".to_owned(),
        title: "Replies of servers under each guarantee".to_owned(),
        about: "every reply is checked; latency from when a request was due".to_owned(),
        panels: vec![
            panel(Axis::log("seldom: latency p50, ms"), |one| one.seldom.latency_ms.p50),
            panel(Axis::log("half load: latency p99, ms"), |one| one.half.latency_ms.p99),
            panel(Axis::linear("saturated: replies/s"), |one| one.saturated.replies_per_s),
            panel(Axis::linear("saturated: agents' CPU, %"), |one| one.saturated.agents * 100.0),
        ],
    }
}

fn cases(arguments: &LatencyArguments) -> Vec<Case<'_>> {
    let guarantees: &[&str] =
        if arguments.no_timeline { &["output-commit"] } else { &["output-commit", "timeline"] };
    let pairs =
        arguments.chosen().flat_map(|server| guarantees.iter().map(move |with| (server, *with)));
    let case = |(server, guarantee): (&'static str, &'static str)| Case {
        name: format!("{server}, {guarantee}"),
        measure: Box::new(move |hotspare: &Path| {
            let result = latency(&arguments.bench(server, hotspare, Some(guarantee), None))?;
            let mut figures = Figures::from([
                ("seldom p50 ms".to_owned(), result.seldom.latency_ms.p50),
                ("seldom p99 ms".to_owned(), result.seldom.latency_ms.p99),
                ("saturated replies/s".to_owned(), result.saturated.replies_per_s),
                ("agents' CPU %".to_owned(), result.saturated.agents * 100.0),
            ]);
            for (load, met) in [("seldom", &result.seldom), ("saturated", &result.saturated)] {
                for part in ["pause", "scan"] {
                    let spread = met.epochs.get(&format!("{part}_us")).copied().unwrap_or_default();
                    figures.insert(format!("{load} {part} p50 µs"), spread.p50);
                }
            }
            Ok(figures)
        }),
    };
    pairs.map(case).collect()
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
