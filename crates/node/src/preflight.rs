//! `hotspare check`: can this kernel, and this program, be protected?

use std::time::Duration;

use anyhow::bail;
use clap::Args;
use hotspare_net::takeover::ServiceAddress;

use crate::rhythm::Epochs;
use crate::settings::{FileRule, Settings};
use crate::{features, look, trial};

/// Exit status when something is in the way.
const OBSTACLE: u8 = 2;
/// Exit status when it could not be found out.
pub const UNKNOWN: u8 = 1;

/// What to look at.
#[derive(Debug, Args)]
pub struct CheckArguments {
    /// A running process to look at, with all its descendants. It is not disturbed: only /proc is
    /// read.
    #[arg(long, conflicts_with = "command")]
    pid: Option<i32>,
    /// How long the program runs for the check.
    #[arg(long = "for", default_value = "2s", value_parser = crate::cli::duration)]
    time: Duration,
    /// As for `hotspare run`: what the program may write.
    #[arg(long)]
    pub files: Vec<FileRule>,
    /// As for `hotspare run`. For the check the address is on the program's loopback interface
    /// only: nobody outside sees it.
    #[arg(long)]
    pub service_address: Option<ServiceAddress>,
    /// Working directory of the program.
    #[arg(long, default_value = "/")]
    pub directory: String,
    /// A program to run for a short time as `hotspare run` would. It really runs, with the data it
    /// finds.
    #[arg(last = true)]
    pub command: Vec<String>,
}

impl CheckArguments {
    /// As a guest has them.
    pub fn settings(&self) -> Settings {
        Settings {
            guest: self.command.first().cloned().unwrap_or_default(),
            epochs: Epochs::Every(Duration::from_millis(100)),
            service: self.service_address,
            files: self.files.clone(),
            guarantee: crate::settings::Guarantee::default(),
            arbiter: None,
            path: crate::settings::PacketPath::default(),
            store: None,
            commit_on: hotspare_cluster::Quorum::default(),
        }
    }

    /// How long the program runs.
    pub fn time(&self) -> Duration {
        self.time
    }
}

/// Something that stands in the way, and the way out.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Obstacle {
    /// The object and the reason.
    pub what: String,
    /// What to do.
    pub way_out: String,
}

/// An obstacle with its way out.
pub fn obstacle(what: impl Into<String>, way_out: impl Into<String>) -> Obstacle {
    Obstacle { what: what.into(), way_out: way_out.into() }
}

/// Fails with a clear message where the kernel cannot do it.
pub fn require_kernel() -> anyhow::Result<()> {
    match features::missing(false).into_iter().next() {
        None => Ok(()),
        Some(first) => bail!("{}: {} (`hotspare check` lists all)", first.what, first.way_out),
    }
}

/// Prints what is in the way; the exit status says whether anything is.
pub fn check(arguments: &CheckArguments) -> u8 {
    match try_check(arguments) {
        Ok(found) if found.is_empty() => {
            println!("nothing is in the way");
            0
        }
        Ok(found) => {
            for one in &found {
                println!("✗ {}\n  → {}", one.what, one.way_out);
            }
            OBSTACLE
        }
        Err(error) => {
            eprintln!("hotspare: {error:#}");
            UNKNOWN
        }
    }
}

fn try_check(arguments: &CheckArguments) -> anyhow::Result<Vec<Obstacle>> {
    let mut found = kernel(arguments.pid.is_none() && arguments.command.is_empty());
    if let Some(pid) = arguments.pid {
        let processes = look::family(pid)?;
        found.extend(look::look(&processes, &arguments.settings().rules(), 0)?);
        println!(
            "looked at {} process(es) by /proc alone; `check -- CMD` sees more",
            processes.len()
        );
    } else if !arguments.command.is_empty() && found.is_empty() {
        found.extend(trial::run(arguments)?);
    }
    Ok(found)
}

/// What the kernel lacks; tells each feature where that is all there is to tell.
fn kernel(tell: bool) -> Vec<Obstacle> {
    for note in features::notes() {
        println!("! {note}");
    }
    if !tell {
        return features::missing(true);
    }
    let mut found = Vec::new();
    for feature in &features::ALL {
        match feature.probe() {
            None => println!("✓ {}", feature.name),
            Some(obstacle) => found.push(obstacle),
        }
        // Without root nothing else can be told.
        if !nix::unistd::geteuid().is_root() {
            break;
        }
    }
    found
}
