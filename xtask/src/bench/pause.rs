//! `cargo xtask bench pause`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use hotspare_torture::bench::{Measured, PauseBench, PauseResult, Spread, pause};
use serde_json::json;

use super::PARTS;
use super::against::{Case, Figures, compare};
use super::plot::{Axis, Curve, Panel, Plot};
use super::report::{Common, Report, Table, wrapped};
use crate::tree;

#[derive(Clone, Debug, Args)]
pub struct PauseArguments {
    #[command(flatten)]
    common: Common,
    /// Numbers of keys
    #[arg(long, value_delimiter = ',', default_value = "1000,10000,100000,1000000,10000000")]
    keys: Vec<u64>,
    /// Shares of writes
    #[arg(long, value_delimiter = ',', default_value = "0.1,0.5")]
    writes: Vec<f64>,
    /// Milliseconds between two checkpoints
    #[arg(long, default_value_t = 100)]
    epoch_ms: u64,
    /// Seconds measured for each load
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Requests a second of the steady load
    #[arg(long, default_value_t = 5000.0)]
    rate: f64,
    /// Leaves out the mode that stops and copies everything
    #[arg(long)]
    no_stop_and_copy: bool,
}

impl PauseArguments {
    pub fn with(common: Common) -> PauseArguments {
        PauseArguments {
            common,
            keys: vec![1000, 10_000, 100_000, 1_000_000, 10_000_000],
            writes: vec![0.1, 0.5],
            epoch_ms: 100,
            seconds: 10.0,
            rate: 5000.0,
            no_stop_and_copy: false,
        }
    }

    /// Sizes and loads.
    fn beds(&self) -> Vec<(u64, f64)> {
        if self.common.quick {
            return vec![(1000, 0.5)];
        }
        let beds = self.keys.iter().flat_map(|keys| self.writes.iter().map(move |w| (*keys, *w)));
        beds.collect()
    }

    /// With loads that fit into the minutes that there are: three without checkpoints and two for
    /// each mode, each kind in a lab of its own that is filled at half a million keys a second.
    fn fitting(&self) -> PauseArguments {
        let modes = if self.no_stop_and_copy { 1.0 } else { 2.0 };
        let beds = self.beds();
        let filling = |(keys, _): &(u64, f64)| 2.0 + *keys as f64 / 5e5;
        let others_s = beds.iter().map(filling).sum::<f64>() * (3.0 + modes);
        let loads = beds.len() as f64 * (3.0 + modes * 2.0);
        let seconds = self.common.seconds("pause", self.seconds, loads, others_s);
        PauseArguments { seconds, ..self.clone() }
    }

    fn length(&self) -> Duration {
        Duration::from_secs_f64(if self.common.quick { 0.3 } else { self.seconds })
    }
}

/// Measures and shows.
pub fn pauses(arguments: &PauseArguments) -> Result<()> {
    if let Some(rev) = &arguments.common.against {
        return compare("pause", &arguments.common, rev, &cases(arguments));
    }
    let hotspare = tree::build_hotspare()?;
    let arguments = &arguments.fitting();
    let mut report = Report::new("pause", &arguments.common)?;
    let mut all = Vec::new();
    let (mut overview, mut parts) = tables();
    for (keys, writes) in arguments.beds() {
        for (name, result, without) in rows(&hotspare, keys, writes, arguments)? {
            let head = [name.to_owned(), keys.to_string(), format!("{:.0} %", writes * 100.0)];
            overview.row(head.iter().cloned().chain(overview_of(&result, without)));
            let each = PARTS.iter().map(|part| three(&result.steady, part));
            parts.row(head.iter().cloned().chain(each));
            let [plain, bare] = without;
            let of = json!({ "mode": name, "keys": keys, "writes": writes, "plain_per_s": plain,
                "no_spare_per_s": bare });
            report.add(of, &result)?;
            all.push((name, keys, writes, result));
        }
    }
    report.plot(plot(&all));
    let text = format!(
        "{}\n{}\nParts of the pause under the steady load, µs, p50 / p99 / max:\n\n{}",
        wrapped(&about(arguments)),
        overview.text,
        parts.text
    );
    report.finish("pause", &text)
}

fn tables() -> (Table, Table) {
    let overview = Table::new(&[
        "mode",
        "keys",
        "writes",
        "Redis MB",
        "pause µs p50 / p99 / max",
        "bytes/epoch",
        "saturated: pause µs",
        "plain/s",
        "no spare/s",
        "protected/s",
        "loss",
        "CPU % run / spare",
        "RSS MB run / spare",
    ]);
    let parts = Table::new(&[
        "mode",
        "keys",
        "writes",
        "stop",
        "registers",
        "scan",
        "objects",
        "copy",
        "files",
        "resume",
    ]);
    (overview, parts)
}

fn about(arguments: &PauseArguments) -> String {
    format!(
        "Redis, values of 72 bytes, a checkpoint every {} ms, {} s each. Steady load: {} requests \
         a second on 8 connections; pauses, parts and bytes are of it. Saturated: 8 connections, \
         each as fast as replies come; \"plain\" is Redis alone, \"no spare\" Redis under \
         `hotspare run` without a spare: no checkpoints, but namespaces of its own and one bridge \
         more. Plain is measured before and after the others; loss is against the mean. CPU: of \
         the agents under the saturated load, guest and ghost apart. RSS: most of the run so far, \
         filling and the first copy included.",
        arguments.epoch_ms, arguments.seconds, arguments.rate
    )
}

/// One panel for each share of writes that was measured.
fn plot(all: &[(&'static str, u64, f64, PauseResult)]) -> Plot {
    let mut shares: Vec<f64> = all.iter().map(|(_, _, writes, _)| *writes).collect();
    shares.sort_by(f64::total_cmp);
    shares.dedup();
    let panel = |share: &f64| {
        let curve = |mode: &str, name: &str, of: fn(Spread) -> f64| Curve {
            name: format!("{mode}, {name}"),
            points: all
                .iter()
                .filter(|(of, _, writes, _)| *of == mode && writes == share)
                .filter_map(|(_, keys, _, result)| {
                    let pause = result.steady.epochs.get("pause_us")?;
                    Some((*keys as f64, of(*pause)))
                })
                .collect(),
        };
        let modes = ["pre-copy", "stop-and-copy"];
        let curves = modes
            .iter()
            .flat_map(|mode| [curve(mode, "p50", |s| s.p50), curve(mode, "p99", |s| s.p99)]);
        Panel {
            x: Axis::log("keys of 72 bytes"),
            y: Axis::log(&format!("pause at {:.0} % writes, µs", share * 100.0)),
            curves: curves.filter(|curve| !curve.points.is_empty()).collect(),
        }
    };
    Plot {
        name: "keys".to_owned(),
        title: "Pauses of a Redis over its size".to_owned(),
        about: "steady load; both scales logarithmic".to_owned(),
        panels: shares.iter().map(panel).collect(),
    }
}

fn cases(arguments: &PauseArguments) -> Vec<Case<'_>> {
    let case = |(keys, writes): (u64, f64)| Case {
        name: format!("{keys} keys, {:.0} % writes", writes * 100.0),
        measure: Box::new(move |hotspare: &Path| {
            let hotspare = hotspare.to_owned();
            let result = run((Some(&hotspare), true), &[], keys, writes, arguments)?;
            let pause = result.steady.epochs.get("pause_us").copied().unwrap_or_default();
            Ok(Figures::from([
                ("pause p50 µs".to_owned(), pause.p50),
                ("pause p99 µs".to_owned(), pause.p99),
                ("saturated replies/s".to_owned(), result.saturated.replies_per_s),
            ]))
        }),
    };
    arguments.beds().into_iter().map(case).collect()
}

/// Each mode with the replies a second of an unprotected Redis, and of one without a spare. What
/// the machine does for others changes by the minute: plain is measured on both sides.
fn rows(
    hotspare: &PathBuf,
    keys: u64,
    writes: f64,
    arguments: &PauseArguments,
) -> Result<Vec<(&'static str, PauseResult, [f64; 2])>> {
    let replies = |mode| -> Result<f64> {
        Ok(run(mode, &[], keys, writes, arguments)?.saturated.replies_per_s)
    };
    let plain = replies((None, false))?;
    let bare = replies((Some(hotspare), false))?;
    let modes: &[(&str, &[&str])] = &[("pre-copy", &[]), ("stop-and-copy", &["--stop-and-copy"])];
    let modes = &modes[..if arguments.no_stop_and_copy { 1 } else { 2 }];
    let measure = |(name, more): &(&'static str, &[&str])| {
        let more: Vec<String> = more.iter().map(ToString::to_string).collect();
        Ok((*name, run((Some(hotspare), true), &more, keys, writes, arguments)?))
    };
    let results = modes.iter().map(measure).collect::<Result<Vec<_>>>()?;
    let plain = (plain + replies((None, false))?) / 2.0;
    Ok(results.into_iter().map(|(name, result)| (name, result, [plain, bare])).collect())
}

fn run(
    (hotspare, spare): (Option<&PathBuf>, bool),
    more: &[String],
    keys: u64,
    writes: f64,
    arguments: &PauseArguments,
) -> Result<PauseResult> {
    Ok(pause(&PauseBench {
        hotspare: hotspare.cloned(),
        spare,
        more: more.to_vec(),
        keys,
        writes,
        rate_per_s: arguments.rate,
        epoch: Duration::from_millis(arguments.epoch_ms),
        length: arguments.length(),
    })?)
}

fn overview_of(result: &PauseResult, [plain, bare]: [f64; 2]) -> [String; 10] {
    let protected = result.saturated.replies_per_s;
    let used = result.saturated.used.map(|used| format!("{:.0}", used * 100.0)).join(" / ");
    let bytes = result.steady.epochs.get("bytes").copied().unwrap_or_default();
    [
        format!("{:.0}", result.guest_mb),
        three(&result.steady, "pause_us"),
        if bytes.count == 0 { "none".to_owned() } else { format!("{:.0}", bytes.p50) },
        three(&result.saturated, "pause_us"),
        format!("{plain:.0}"),
        format!("{bare:.0}"),
        format!("{protected:.0}"),
        format!("{:.1} %", (1.0 - protected / plain) * 100.0),
        used,
        format!("{:.0} / {:.0}", result.primary_rss_mb, result.spare_rss_mb),
    ]
}

/// Of the checkpoints there were in the time.
fn three(measured: &Measured, name: &str) -> String {
    match measured.epochs.get(name) {
        Some(Spread { p50, p99, max, count: 1.., .. }) => format!("{p50:.0} / {p99:.0} / {max:.0}"),
        _ => "none".to_owned(),
    }
}
