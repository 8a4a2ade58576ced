//! `cargo xtask bench sentinel`.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use hotspare_torture::bench::{Keeper, RivalBench, RivalResult, Spread, rival};
use serde_json::json;

use super::plot::{Axis, Curve, Panel, Plot};
use super::report::{Common, Report, Table, wrapped};
use crate::tree;

#[derive(Debug, Args)]
pub struct SentinelArguments {
    #[command(flatten)]
    common: Common,
    /// Records
    #[arg(long, default_value_t = 100_000)]
    keys: u64,
    /// Requests a second, all of them writes
    #[arg(long, default_value_t = 400.0)]
    rate: f64,
    /// Clients
    #[arg(long, default_value_t = 8)]
    clients: usize,
    /// Milliseconds between two checkpoints
    #[arg(long, default_value_t = 100)]
    epoch_ms: u64,
    /// Milliseconds of silence after which a Sentinel takes its Redis for dead
    #[arg(long, default_value_t = 100)]
    sentinel_ms: u64,
    /// Deaths of each, in turns
    #[arg(long, default_value_t = 20)]
    count: usize,
}

impl SentinelArguments {
    pub fn with(common: Common) -> SentinelArguments {
        SentinelArguments {
            common,
            keys: 100_000,
            rate: 400.0,
            clients: 8,
            epoch_ms: 100,
            sentinel_ms: 100,
            count: 20,
        }
    }
}

/// Kills in turns and shows what clients saw.
pub fn sentinels(arguments: &SentinelArguments) -> Result<()> {
    ensure!(arguments.common.against.is_none(), "bench sentinel compares with a peer, not commits");
    let hotspare = tree::build_hotspare()?;
    let mut report = Report::new("sentinel", &arguments.common)?;
    let is_quick = arguments.common.quick;
    let keepers = if is_quick { &Keeper::ALL[1..] } else { &Keeper::ALL[..] };
    let mut all: Vec<(Keeper, Vec<RivalResult>)> =
        keepers.iter().map(|keeper| (*keeper, vec![])).collect();
    let turns = if is_quick { 1 } else { arguments.count };
    let mut unprotected = 0;
    for turn in arguments.common.rounds("sentinel", turns, 1.0) {
        for (keeper, results) in &mut all {
            let bench = RivalBench {
                keeper: *keeper,
                hotspare: hotspare.clone(),
                keys: if is_quick { 1000 } else { arguments.keys },
                rate_per_s: arguments.rate,
                clients: arguments.clients,
                epoch: Duration::from_millis(arguments.epoch_ms),
                sentinel_ms: arguments.sentinel_ms,
                before: Duration::from_millis(if is_quick { 300 } else { 1000 }),
            };
            let died = || rival(&bench).with_context(|| keeper.name());
            let mut result = died()?;
            // Its spare was lost in the same moment: two faults at once, which it does not promise
            // to survive. Not hidden, and not for ever.
            while result.unprotected {
                unprotected += 1;
                println!("turn {turn}, {}: no spare when its host died", keeper.name());
                ensure!(unprotected <= turns, "it is seldom protected here");
                result = died()?;
            }
            println!("turn {turn}, {}: clients wait {:.0} ms", keeper.name(), result.outage_ms);
            report.note(json!({ "keeper": keeper.name() }), &result)?;
            results.push(result);
        }
    }
    let mut table = Table::new(&COLUMNS);
    for (keeper, results) in &all {
        table.row(cells(*keeper, results));
        report.add(json!({ "keeper": keeper.name() }), results)?;
    }
    let mut about = format!(
        "A Redis of {} records of 100 bytes, {} clients that write {} times a second in all; its \
         host dies at once, without a word. Each client appends numbers to a list; lost are those \
         that were acknowledged and are not in it at the end. It waits 250 ms for a reply, then \
         connects anew. Hotspare: a checkpoint every {} ms, 90 ms of silence, two hosts, no \
         arbiter. Sentinel: a replica and three Sentinels on three hosts, quorum 2, \
         down-after-milliseconds {} (its default is 30,000), failover-timeout 1,000; clients ask \
         it before they connect, and check the role. In turns. Clients wait: the longest time \
         without any reply around the death; all back: from the death until each client had a \
         reply. p50 / p99 / max.",
        arguments.keys,
        arguments.clients,
        arguments.rate,
        arguments.epoch_ms,
        arguments.sentinel_ms
    );
    if unprotected > 0 {
        about += &format!(
            " {unprotected} more deaths met a Hotspare that had just said it had no spare (its \
             heartbeats were late): the guest was lost."
        );
    }
    report.plot(plot(&all));
    report.finish("sentinel", &format!("{}\n{}", wrapped(&about), table.text))
}

/// Every death as a dot, over who keeps the Redis.
fn plot(all: &[(Keeper, Vec<RivalResult>)]) -> Plot {
    let names: Vec<String> = all.iter().map(|(keeper, _)| keeper.name().to_owned()).collect();
    let curve = |name: &str, of: fn(&RivalResult) -> f64| Curve {
        name: name.to_owned(),
        points: all
            .iter()
            .enumerate()
            .flat_map(|(place, (_, results))| {
                results.iter().map(move |one| (place as f64, of(one)))
            })
            .collect(),
    };
    let panel =
        |y: Axis, curve| Panel { x: Axis::names("kept by", &names), y, curves: vec![curve] };
    Plot {
        name: "deaths".to_owned(),
        title: "A host's death as clients of a Redis see it".to_owned(),
        about: "each dot a death; left: logarithmic".to_owned(),
        panels: vec![
            panel(Axis::log("clients wait, ms"), curve("a death", |one| one.outage_ms)),
            panel(
                Axis::linear("acknowledged writes lost"),
                curve("a death", |one| one.lost as f64),
            ),
        ],
    }
}

const COLUMNS: [&str; 7] = [
    "kept by",
    "deaths",
    "clients wait, ms",
    "all back, ms",
    "acknowledged writes lost in a death",
    "connections broken, of all",
    "requests failed",
];

fn cells(keeper: Keeper, results: &[RivalResult]) -> [String; 7] {
    let three = |of: fn(&RivalResult) -> f64| {
        let Spread { p50, p99, max, .. } = Spread::of(results.iter().map(of).collect());
        format!("{p50:.0} / {p99:.0} / {max:.0}")
    };
    let sum = |of: fn(&RivalResult) -> usize| results.iter().map(of).sum::<usize>().to_string();
    [
        keeper.name().to_owned(),
        results.len().to_string(),
        three(|one| one.outage_ms),
        three(|one| one.all_back_ms),
        three(|one| one.lost as f64),
        sum(|one| one.broken),
        sum(|one| one.failed),
    ]
}
