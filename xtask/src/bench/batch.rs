//! `cargo xtask bench batch`.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use hotspare_torture::bench::{BatchBench, BatchProgram, BatchResult, batch, median};
use hotspare_torture::programs::build_examples;
use serde_json::{Value, json};

use super::plot::{Axis, Curve, Panel, Plot};
use super::report::{Common, Report, Table, wrapped};
use crate::tree;

#[derive(Debug, Args)]
pub struct BatchArguments {
    #[command(flatten)]
    common: Common,
    /// Threads of the programs
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    threads: Vec<usize>,
    /// Milliseconds between two checkpoints
    #[arg(long, default_value_t = 100)]
    epoch_ms: u64,
    /// Runs of each, in turns
    #[arg(long, default_value_t = 20)]
    rounds: usize,
}

impl BatchArguments {
    pub fn with(common: Common) -> BatchArguments {
        BatchArguments { common, threads: vec![1, 2], epoch_ms: 100, rounds: 20 }
    }
}

/// How a program is protected, and what `hotspare run` is told for it.
const GUARANTEES: [(&str, &[&str]); 3] = [
    ("none", &[]),
    ("timeline", &["--guarantee", "timeline"]),
    ("output-commit", &["--guarantee", "output-commit"]),
];

/// Runs each program in turns without and with protection.
pub fn batches(arguments: &BatchArguments) -> Result<()> {
    ensure!(
        arguments.common.against.is_none(),
        "bench batch compares with plain runs, not commits"
    );
    build_examples().context("build the examples")?;
    let hotspare = tree::build_hotspare()?;
    let mut report = Report::new("batch", &arguments.common)?;
    let is_quick = arguments.common.quick;
    let threads = if is_quick { &[2][..] } else { &arguments.threads };
    let guarantees = &GUARANTEES[..if is_quick { 2 } else { 3 }];
    let runs = BatchProgram::ALL.iter().flat_map(|program| {
        threads.iter().map(move |threads| (*program, *threads, vec![Vec::new(); guarantees.len()]))
    });
    let mut runs: Vec<(BatchProgram, usize, Vec<Vec<BatchResult>>)> = runs.collect();
    let rounds = if is_quick { 1 } else { arguments.rounds };
    for round in arguments.common.rounds("batch", rounds, 1.0) {
        for (program, threads, all) in &mut runs {
            for (results, guarantee) in all.iter_mut().zip(guarantees) {
                let bench = bench(*program, *threads, &hotspare, guarantee.1, arguments);
                let result = batch(&bench).with_context(|| program.name())?;
                let (name, seconds) = (program.name(), result.seconds);
                println!("round {round}, {name}, {threads}, {}: {seconds:.2} s", guarantee.0);
                report.note(of(*program, *threads, guarantee.0), &result)?;
                results.push(result);
            }
        }
    }
    let mut table = Table::new(&COLUMNS);
    for (program, threads, all) in &runs {
        for (results, (guarantee, _)) in all.iter().zip(guarantees) {
            table.row(cells(*program, *threads, guarantee, results, &all[0]));
            report.add(of(*program, *threads, guarantee), results)?;
        }
    }
    report.plot(plot(&runs));
    let about = format!(
        "`examples/batch`: swaptions computes (64 options, {} trials), streamcluster writes 4 MiB \
         again and again ({} blocks). A checkpoint every {} ms, {} rounds, medians. Time: what the \
         program tells, from its first statement to the last thread's end. Overhead: against the \
         run without protection of the same round, in turns; what else the machine does is in it. \
         CPU: of all programs of a host over the whole run with its start, in brackets what the \
         agent used; its overhead against the primary's host without protection. Each result is \
         compared with the golden copy. With two threads programs alone use both processors, so \
         what the spare's host would do for itself is taken from them here.",
        BatchProgram::Swaptions.size(is_quick),
        BatchProgram::Streamcluster.size(is_quick),
        arguments.epoch_ms,
        runs[0].2[0].len(),
    );
    report.finish("batch", &format!("{}\n{}", wrapped(&about), table.text))
}

/// What a run is of.
fn of(program: BatchProgram, threads: usize, guarantee: &str) -> Value {
    json!({ "program": program.name(), "threads": threads, "guarantee": guarantee })
}

/// Over the programs: what each run took longer than the one of its round without protection, and
/// the processor time that this was.
fn plot(runs: &[(BatchProgram, usize, Vec<Vec<BatchResult>>)]) -> Plot {
    let name =
        |(program, threads, _): &(BatchProgram, usize, _)| format!("{} {threads}", program.name());
    let names: Vec<String> = runs.iter().map(name).collect();
    let curve = |guarantee: usize, of: fn(&BatchResult) -> f64| Curve {
        name: GUARANTEES[guarantee].0.to_owned(),
        points: runs
            .iter()
            .enumerate()
            .flat_map(|(place, (_, _, all))| {
                let pairs = all[guarantee].iter().zip(&all[0]);
                pairs.map(move |(with, without)| (place as f64, of(with) / of(without)))
            })
            .collect(),
    };
    let panel = |y: &str, of: fn(&BatchResult) -> f64| Panel {
        x: Axis::names("program and its threads", &names),
        y: Axis::linear(y),
        curves: (1..runs[0].2.len()).map(|guarantee| curve(guarantee, of)).collect(),
    };
    Plot {
        name: "programs".to_owned(),
        title: "What protection takes from programs that only compute".to_owned(),
        about: "each dot a run, against the one without protection of the same round (1)"
            .to_owned(),
        panels: vec![
            panel("time, times that without", |one| one.seconds),
            panel("processor time of both hosts, times that without", |one| {
                one.primary_s + one.spare_s
            }),
        ],
    }
}

fn bench(
    program: BatchProgram,
    threads: usize,
    hotspare: &Path,
    more: &[&str],
    arguments: &BatchArguments,
) -> BatchBench {
    let words = more.iter().map(|word| (*word).to_owned()).collect();
    BatchBench {
        program,
        threads,
        size: program.size(arguments.common.quick),
        protection: (!more.is_empty()).then(|| (hotspare.to_owned(), words)),
        epoch: Duration::from_millis(arguments.epoch_ms),
    }
}

const COLUMNS: [&str; 9] = [
    "program",
    "threads",
    "guarantee",
    "time, s",
    "overhead",
    "CPU s primary (agent)",
    "CPU s spare",
    "CPU overhead primary / spare",
    "pause ms p50 / p99, bytes p50",
];

fn cells(
    program: BatchProgram,
    threads: usize,
    guarantee: &str,
    results: &[BatchResult],
    alone: &[BatchResult],
) -> [String; 9] {
    let middle = |of: fn(&BatchResult) -> f64| median(results.iter().map(of).collect());
    let parts = |of: fn(&BatchResult, &BatchResult) -> f64| {
        let pairs = results.iter().zip(alone).map(|(with, without)| of(with, without) * 100.0);
        median(pairs.collect())
    };
    let overhead = parts(|with, without| with.seconds / without.seconds - 1.0);
    let primary = parts(|with, without| with.primary_s / without.primary_s - 1.0);
    let spare = parts(|with, without| with.spare_s / without.primary_s);
    let is_alone = guarantee == "none";
    let only = |text: String| if is_alone { String::new() } else { text };
    [
        program.name().to_owned(),
        threads.to_string(),
        guarantee.to_owned(),
        format!("{:.2}", middle(|one| one.seconds)),
        only(format!("{overhead:.1} %")),
        format!("{:.2}", middle(|one| one.primary_s))
            + &only(format!(" ({:.2})", middle(|one| one.agent_s))),
        only(format!("{:.2}", middle(|one| one.spare_s))),
        only(format!("{primary:.1} % / {spare:.1} %")),
        only(format!(
            "{:.2} / {:.2}, {:.0}",
            middle(|one| one.pause_ms.p50),
            middle(|one| one.pause_ms.p99),
            middle(|one| one.bytes.p50)
        )),
    ]
}
