//! `cargo xtask bench failover`.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use hotspare_torture::bench::{
    FailoverBench, FailoverResult, PauseBench, Spread, Victim, failover,
};

use serde_json::{Value, json};

use super::against::{Case, Figures, compare};
use super::plot::{Axis, Curve, Panel, Plot};
use super::report::{Common, Report, Table, wrapped};
use crate::tree;

#[derive(Debug, Args)]
pub struct FailoverArguments {
    #[command(flatten)]
    common: Common,
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
    #[arg(long, default_value_t = 20)]
    count: usize,
    /// Milliseconds between two checkpoints
    #[arg(long, default_value_t = 100)]
    epoch_ms: u64,
    /// Requests a second, a tenth of them writes; a client of `output-commit` does not get more
    /// than a few hundred answered on each of its eight connections
    #[arg(long, default_value_t = 1000.0)]
    rate: f64,
}

impl FailoverArguments {
    pub fn with(common: Common) -> FailoverArguments {
        FailoverArguments {
            common,
            keys: vec![1000, 10_000, 100_000, 1_000_000, 10_000_000],
            dies: vec![Victim::Host],
            guarantee: "timeline".to_owned(),
            count: 20,
            epoch_ms: 100,
            rate: 1000.0,
        }
    }

    /// What a death is of.
    fn of(&self, keys: u64, victim: Victim) -> Value {
        json!({ "keys": keys, "dies": victim.to_string(), "guarantee": self.guarantee })
    }

    /// Under `output-commit`, and also when less than the host dies.
    pub fn unnoticed(common: Common) -> FailoverArguments {
        let mut dies = vec![Victim::Host, Victim::Agent, Victim::Guest];
        if !common.hosts.is_empty() {
            dies.truncate(2);
        }
        FailoverArguments {
            keys: vec![100_000],
            dies,
            guarantee: "output-commit".to_owned(),
            count: 20,
            rate: 400.0,
            ..FailoverArguments::with(common)
        }
    }

    fn keys(&self) -> &[u64] {
        if self.common.quick { &[1000] } else { &self.keys }
    }

    fn count(&self) -> usize {
        if self.common.quick { 1 } else { self.count }
    }

    fn bench(&self, hotspare: &Path, keys: u64, victim: Victim) -> FailoverBench {
        let bed = PauseBench {
            hotspare: Some(hotspare.to_owned()),
            spare: true,
            more: vec!["--guarantee".into(), self.guarantee.clone()],
            keys,
            writes: 0.1,
            rate_per_s: self.rate,
            epoch: Duration::from_millis(self.epoch_ms),
            length: Duration::from_secs(1),
        };
        FailoverBench { bed, victim }
    }
}

const COLUMNS: [&str; 9] = [
    "keys",
    "dies",
    "times",
    "clients wait",
    "detect",
    "apply",
    "finalise",
    "address",
    "requests failed",
];

/// Kills and prints what it took.
pub fn failovers(arguments: &FailoverArguments) -> Result<()> {
    if let Some(rev) = &arguments.common.against {
        return compare("failover", &arguments.common, rev, &cases(arguments));
    }
    ensure!(
        arguments.common.hosts.is_empty() || !arguments.dies.contains(&Victim::Guest),
        "the guest of a real host is not killed alone: --dies host,agent"
    );
    let hotspare = tree::build_hotspare()?;
    let mut report = Report::new("failover", &arguments.common)?;
    let mut table = Table::new(&COLUMNS);
    let deaths = arguments.keys().iter().flat_map(|keys| {
        arguments.dies.iter().map(move |victim| (*keys, *victim, Vec::<FailoverResult>::new()))
    });
    let mut all: Vec<_> = deaths.collect();
    for round in arguments.common.rounds("failover", arguments.count(), 1.0) {
        for (keys, victim, results) in &mut all {
            let result = failover(&arguments.bench(&hotspare, *keys, *victim));
            let result = result.with_context(|| format!("{keys} keys, the {victim} dies"))?;
            println!("round {round}, {keys} keys, {victim}: {:.0} ms", result.outage_ms);
            report.note(arguments.of(*keys, *victim), &result)?;
            results.push(result);
        }
    }
    for (keys, victim, results) in &all {
        row(&mut table, *keys, *victim, results);
        report.add(arguments.of(*keys, *victim), results)?;
    }
    if arguments.keys().len() > 1 {
        report.plot(plot(arguments, &all));
    }
    let about = format!(
        "Redis, values of 72 bytes, `--guarantee {}`, under {} requests a second on 8 connections, \
         a tenth of them writes. Clients wait: the longest time without any reply around the \
         death. Detect begins with the last sign of life. ms, p50 / p99 / max.",
        arguments.guarantee, arguments.rate
    );
    let text = format!("{}\n{}", wrapped(&about), table.text);
    let place = match arguments.guarantee.as_str() {
        "timeline" => "failover",
        _ => "unnoticed failover",
    };
    report.finish(place, &text)
}

/// One panel for each who dies.
fn plot(arguments: &FailoverArguments, all: &[(u64, Victim, Vec<FailoverResult>)]) -> Plot {
    let panel = |victim: &Victim| {
        let curve = |name: &str, of: fn(&FailoverResult) -> f64| Curve {
            name: name.to_owned(),
            points: all
                .iter()
                .filter(|(_, died, _)| died == victim)
                .map(|(keys, _, results)| {
                    (*keys as f64, Spread::of(results.iter().map(of).collect()).p50)
                })
                .collect(),
        };
        Panel {
            x: Axis::log("keys of 72 bytes"),
            y: Axis::log(&format!("ms, p50, when the {victim} dies")),
            curves: vec![
                curve("clients wait", |one| one.outage_ms),
                curve("detect", |one| one.failover.detect_ms),
                curve("apply", |one| one.failover.apply_ms),
                curve("finalise", |one| one.failover.finalise_ms),
                curve("address", |one| one.failover.address_ms),
            ],
        }
    };
    Plot {
        name: "keys".to_owned(),
        title: format!("Takeovers of a Redis over its size, {}", arguments.guarantee),
        about: "medians; both scales logarithmic".to_owned(),
        panels: arguments.dies.iter().map(panel).collect(),
    }
}

fn cases(arguments: &FailoverArguments) -> Vec<Case<'_>> {
    let deaths = arguments
        .keys()
        .iter()
        .flat_map(|keys| arguments.dies.iter().map(move |victim| (*keys, *victim)));
    let case = |(keys, victim): (u64, Victim)| Case {
        name: format!("{keys} keys, the {victim} dies"),
        measure: Box::new(move |hotspare: &Path| {
            let result = failover(&arguments.bench(hotspare, keys, victim))?;
            Ok(Figures::from([
                ("clients wait ms".to_owned(), result.outage_ms),
                ("finalise ms".to_owned(), result.failover.finalise_ms),
            ]))
        }),
    };
    deaths.map(case).collect()
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
