//! What protection takes from programs that only compute, with threads, and come to an end.

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use super::{Spread, epochs, used_s};
use crate::Lab;
use crate::clock::Instant;
use crate::lab::{LabError, Process, SERVICE_CIDR};
use crate::programs::{examples_dir, golden, start};
use crate::protected::Engine;

/// On a machine that has much else to do.
const RUN_AT_MOST: Duration = Duration::from_secs(300);

/// A program of `examples/batch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchProgram {
    /// Much arithmetic, little memory.
    Swaptions,
    /// Memory that is written again and again, barriers.
    Streamcluster,
}

impl BatchProgram {
    /// All of them.
    pub const ALL: [BatchProgram; 2] = [BatchProgram::Swaptions, BatchProgram::Streamcluster];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            BatchProgram::Swaptions => "swaptions",
            BatchProgram::Streamcluster => "streamcluster",
        }
    }

    /// Its second argument for a run of some seconds, and for one as short as can be. Both have a
    /// golden copy.
    pub fn size(self, is_short: bool) -> u64 {
        match (self, is_short) {
            (BatchProgram::Swaptions, false) => 60_000,
            (BatchProgram::Swaptions, true) => 4000,
            (BatchProgram::Streamcluster, false) => 50,
            (BatchProgram::Streamcluster, true) => 4,
        }
    }
}

/// A run of one of them.
#[derive(Clone, Debug)]
pub struct BatchBench {
    /// Which.
    pub program: BatchProgram,
    /// Its threads.
    pub threads: usize,
    /// Its [`BatchProgram::size`].
    pub size: u64,
    /// The `hotspare` program and what else it is told; without, it runs unprotected.
    pub protection: Option<(PathBuf, Vec<String>)>,
    /// Between two checkpoints.
    pub epoch: Duration,
}

/// What it took.
#[derive(Clone, Debug, Default, Serialize)]
pub struct BatchResult {
    /// As the program tells it itself.
    pub seconds: f64,
    /// Processor time of the primary's host, the program and the agent.
    pub primary_s: f64,
    /// Of which the agent.
    pub agent_s: f64,
    /// Processor time of the spare's host.
    pub spare_s: f64,
    /// Of each checkpoint, ms.
    pub pause_ms: Spread,
    /// Of each checkpoint.
    pub bytes: Spread,
}

/// Runs it in a lab of its own. Another result than the golden copy is an error.
pub fn batch(bench: &BatchBench) -> Result<BatchResult, LabError> {
    let lab = Lab::new(2)?;
    let program = examples_dir().join(bench.program.name()).display().to_string();
    let command = [program, bench.threads.to_string(), bench.size.to_string()];
    let (_spare, primary, begin) = match &bench.protection {
        Some((binary, more)) => {
            let (binary, more) = (binary.clone(), more.clone());
            let (epoch, replicated) = (bench.epoch, vec![]);
            let service_cidr = Some(SERVICE_CIDR.to_owned());
            let engine = Engine { binary, epoch, service_cidr, replicated, more }.patient();
            let spare = engine.patient_spare(lab.host(1))?;
            let begin = begin(&lab)?;
            (Some(spare), engine.run(lab.host(0), &[lab.host(1)], &command)?, begin)
        }
        None => {
            let begin = begin(&lab)?;
            (None, start(lab.host(0), &command)?, begin)
        }
    };
    let mut agent = 0.0;
    let deadline = begin.at + RUN_AT_MOST;
    while primary.try_wait().is_none() && Instant::now() < deadline {
        agent = used_s(&primary);
        std::thread::sleep(Duration::from_millis(10));
    }
    let status = primary.wait(Duration::from_secs(1))?;
    let end = self::begin(&lab)?;
    let said = result_of(&primary);
    let expected = golden(bench.program.name(), bench.size)?;
    if !status.success() || said != expected {
        let doing = format!("run {} ({status})", bench.program.name());
        return Err(LabError::Io { doing, source: std::io::Error::other(primary.said()) });
    }
    let mut epochs = epochs(&primary, (begin.at, end.at));
    let pauses = epochs.remove("pause_us").unwrap_or_default();
    Ok(BatchResult {
        seconds: took_s(&primary)?,
        primary_s: end.used[0] - begin.used[0],
        agent_s: if bench.protection.is_some() { agent } else { 0.0 },
        spare_s: end.used[1] - begin.used[1],
        pause_ms: Spread::of(pauses.iter().map(|us| us / 1e3).collect()),
        bytes: Spread::of(epochs.remove("bytes").unwrap_or_default()),
    })
}

/// An instant, and what the hosts had used by then.
struct Mark {
    at: Instant,
    used: [f64; 2],
}

fn begin(lab: &Lab) -> Result<Mark, LabError> {
    let used = [lab.host(0).used_s()?, lab.host(1).used_s()?];
    Ok(Mark { at: Instant::now(), used })
}

/// What the program has written; the agent writes objects in between.
fn result_of(process: &Process) -> String {
    let lines = process.stdout().lines();
    let own = lines.iter().filter(|line| !line.text.starts_with('{'));
    own.map(|line| format!("{}\n", line.text)).collect()
}

/// `took 1.234 s` on standard error.
fn took_s(process: &Process) -> Result<f64, LabError> {
    let took =
        |line: &crate::lab::Line| line.text.strip_prefix("took ")?.strip_suffix(" s")?.parse().ok();
    process.stderr().last(took).ok_or_else(|| LabError::Io {
        doing: "find how long it took".into(),
        source: std::io::Error::other(process.said()),
    })
}
