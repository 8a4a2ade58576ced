//! `cargo xtask bench batch`.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use hotspare_torture::bench::{BatchBench, BatchProgram, BatchResult, batch, median};
use hotspare_torture::programs::build_examples;
use serde_json::json;

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
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

impl BatchArguments {
    pub fn with(common: Common) -> BatchArguments {
        BatchArguments { common, threads: vec![1, 2], epoch_ms: 100, rounds: 5 }
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
    let mut table = Table::new(&COLUMNS);
    let threads = if is_quick { &[2][..] } else { &arguments.threads };
    for program in BatchProgram::ALL {
        for &threads in threads {
            let guarantees = &GUARANTEES[..if is_quick { 2 } else { 3 }];
            let mut results = vec![Vec::new(); guarantees.len()];
            for _ in 0..if is_quick { 1 } else { arguments.rounds } {
                for (results, guarantee) in results.iter_mut().zip(guarantees) {
                    let bench = bench(program, threads, &hotspare, guarantee.1, arguments);
                    results.push(batch(&bench).with_context(|| program.name())?);
                }
            }
            let alone = results[0].clone();
            for (results, (guarantee, _)) in results.iter().zip(guarantees) {
                table.row(cells(program, threads, guarantee, results, &alone));
                let of = json!({ "program": program.name(), "threads": threads,
                    "guarantee": guarantee });
                report.add(of, results)?;
            }
        }
    }
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
        arguments.rounds,
    );
    report.finish("batch", &format!("{}\n{}", wrapped(&about), table.text))
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
