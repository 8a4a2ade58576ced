//! `hotspare check -- CMD`: the program runs for a moment as `hotspare run` would run it, and is
//! looked at again and again as if a checkpoint were to be taken.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::bail;
use hotspare_image::tree::GuestPid;
use hotspare_kernel::{HostPid, pidfd};
use hotspare_process::objects::error::{ObjectError, ObjectResult};
use hotspare_process::objects::table::GuestProcess;
use std::os::fd::AsFd;

use crate::epoch::{Attempt, EpochMaker, Obstacle as Passing};
use crate::launch::{Launch, Network, launch};
use crate::look::{halves, look};
use crate::preflight::{CheckArguments, Obstacle, obstacle};

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(100);
/// So much longer than asked for the program runs until it could be looked at once.
const MORE: Duration = Duration::from_secs(5);

/// Runs the program and returns what is in the way. Tells what was so only for a while.
pub fn run(arguments: &CheckArguments) -> anyhow::Result<Vec<Obstacle>> {
    let settings = arguments.settings();
    let how = Launch {
        command: &arguments.command,
        directory: &arguments.directory,
        network: Network::Loopback,
    };
    let (mut maker, init) = launch(&how, &settings)?;
    let began = Instant::now();
    let mut seen: BTreeMap<Obstacle, u32> = BTreeMap::new();
    let (mut looks, mut taken, mut passing) = (0, 0, None);
    let end = |looks: u32| arguments.time() + if looks == 0 { MORE } else { Duration::ZERO };
    while began.elapsed() < end(looks) {
        maker.guest.pump(&[], PAUSE)?;
        if !maker.guest.is_alive() {
            break;
        }
        let found = match obstacles(&mut maker, &settings.rules()) {
            Err(error) if error.is_transient() => {
                passing = Some(error.to_string());
                continue;
            }
            found => found?,
        };
        looks += 1;
        if found.is_empty() {
            match capture(&mut maker) {
                Ok(None) => taken += 1,
                Ok(Some(state)) => passing = Some(state),
                Err(error) => drop(seen.insert(error, looks)),
            }
        }
        for one in found {
            seen.insert(one, looks);
        }
    }
    let status = maker.guest.root_status();
    init.kill();
    if looks == 0 && passing.is_none() {
        let ended = status.map_or("for an unknown reason".to_owned(), describe);
        bail!("the program ended before it could be looked at ({ended}); run it by itself first");
    }
    let (found, gone): (Vec<_>, Vec<_>) = seen.into_iter().partition(|(_, last)| *last == looks);
    for (one, _) in gone {
        println!("! only for a while: {}", one.what);
    }
    let mut found: Vec<Obstacle> = found.into_iter().map(|(one, _)| one).collect();
    if let Some(state) = passing.filter(|_| found.is_empty() && taken == 0) {
        let way_out = "try a longer --for; a program that stays in this state cannot be protected";
        found.push(obstacle(format!("no checkpoint could be taken: {state}"), way_out));
    }
    if let Some(status) = status {
        println!("the program ended during the check ({})", describe(status));
    }
    println!(
        "ran for {:.1} s, was looked at {looks} times, {taken} checkpoints taken",
        began.elapsed().as_secs_f64()
    );
    Ok(found)
}

fn describe(status: i32) -> String {
    match libc::WIFEXITED(status) {
        true => format!("exit status {}", libc::WEXITSTATUS(status)),
        false => format!("signal {}", libc::WTERMSIG(status)),
    }
}

/// Takes a checkpoint that goes nowhere; a state that passes, if that is why there is none.
fn capture(maker: &mut EpochMaker) -> Result<Option<String>, Obstacle> {
    match maker.attempt() {
        Ok(Attempt::Taken(_)) => Ok(None),
        Ok(Attempt::Later(Passing::Passing(state))) => Ok(Some(state)),
        Ok(Attempt::Later(_)) => Ok(Some("there was not enough time".to_owned())),
        Err(error) => {
            let text = error.root_cause().to_string();
            let halves = text.split_once("; ").map(|(what, out)| (what.to_owned(), out.to_owned()));
            let (what, way_out) = halves.unwrap_or((text, "see LIMITS.md".to_owned()));
            Err(obstacle(what, way_out))
        }
    }
}

/// All that is in the way at this instant; transient where the guest cannot be looked at now.
fn obstacles(
    maker: &mut EpochMaker,
    rules: &hotspare_process::objects::rules::FileRules,
) -> ObjectResult<Vec<Obstacle>> {
    let EpochMaker { guest, objects, .. } = maker;
    let objects = objects.objects();
    let processes: Vec<HostPid> = guest.processes().collect();
    let own = std::process::id() as i32;
    let mut all = Vec::new();
    let found = guest.freeze(|guest| {
        let mut alive = Vec::new();
        for host in &processes {
            let inner = hotspare_kernel::thread_info::status(*host).map(|status| status.inner[0]);
            if let (Ok(inner), Ok(pidfd)) = (inner, pidfd::open(*host)) {
                alive.push((*host, GuestPid(inner), pidfd));
            }
        }
        let list: Vec<_> = alive
            .iter()
            .map(|(host, pid, pidfd)| GuestProcess { host: *host, pid: *pid, pidfd: pidfd.as_fd() })
            .collect();
        let found = objects.descriptors.obstacles(&list, &mut objects.sockets);
        (found, guest.describe_stopped().err())
    })?;
    let (of_descriptors, of_memory) = found;
    let seen = look(&processes, rules, own).unwrap_or_default();
    // A mapping that both have found is told with its process.
    let mapped = seen.iter().any(|one| one.what.contains(" mapped: "));
    let of_memory = of_memory.filter(|_| !mapped);
    let errors: Vec<ObjectError> = of_descriptors?.into_iter().chain(of_memory).collect();
    for error in errors.iter().filter(|error| !error.is_transient()) {
        let (what, way_out) = halves(error);
        all.push(obstacle(what, way_out));
    }
    // What descriptors are has been told in the guest's own numbers.
    all.extend(seen.into_iter().filter(|one| !one.what.contains(", descriptor ")));
    Ok(all)
}
