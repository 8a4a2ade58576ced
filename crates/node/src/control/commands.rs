//! The commands that look at agents and steer them.

use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use hotspare_replica::Identity;
use serde_json::{Value, json};
use tonic::{Code, Status};

use super::DIRECTORY;
use super::ask::{Agent, PATIENCE, ask};
use super::proto::{
    Event, EventsRequest, HistoryRequest, PauseProtectionRequest, RehearseRequest,
    ResumeProtectionRequest, Role, StatusRequest, StatusResponse, SwitchoverRequest, event,
};
use crate::history;
use crate::rehearsal::Plan;

/// Exit status of something that could not be done, and the guest goes on as it was.
const NOT_DONE: u8 = 1;

/// Which agents are meant.
#[derive(Debug, Args)]
pub struct Where {
    /// Ask the agent that has `--control` at this address (HOST:PORT) instead of those of this
    /// host.
    #[arg(long, value_name = "HOST:PORT", requires = "keys")]
    at: Option<String>,
    /// For --at: directory of this host's keys, made by `hotspare keys`.
    #[arg(long, env = "HOTSPARE_KEYS")]
    keys: Option<PathBuf>,
    /// For --at: name of this host among the keys.
    #[arg(long, default_value = "host", env = "HOTSPARE_NAME")]
    name: String,
}

impl Where {
    fn elsewhere(&self) -> anyhow::Result<Option<Agent>> {
        let Some(address) = &self.at else { return Ok(None) };
        let keys = self.keys.as_ref().context("--at needs --keys")?;
        let identity = Identity::load(keys, &self.name)?;
        Ok(Some(Agent::There(address.clone(), identity.into())))
    }

    /// The agents that are meant, with their status.
    fn agents(&self) -> anyhow::Result<Vec<(Agent, StatusResponse)>> {
        match self.elsewhere()? {
            Some(agent) => {
                let status = ask_status(&agent)?.map_err(|status| words(&status))?;
                Ok(vec![(agent, status)])
            }
            None => of_this_host(),
        }
    }

    /// The one agent that is meant, of the part that is wanted.
    fn one(&self, guest: Option<&str>, role: Role) -> anyhow::Result<Agent> {
        let mut agents = self.agents()?;
        let name = |status: &StatusResponse| match role {
            Role::Spare => status.ghost_of.clone().unwrap_or_default(),
            Role::Primary | Role::Unspecified => status.guest.clone(),
        };
        agents.retain(|(_, status)| {
            status.role() == role && guest.is_none_or(|guest| name(status) == guest)
        });
        let names: Vec<_> = agents.iter().map(|(_, status)| name(status)).collect();
        match agents.pop() {
            Some((agent, _)) if agents.is_empty() => Ok(agent),
            Some(_) => bail!(
                "{} guests are on this host: name one with --guest ({})",
                names.len(),
                names.join(", ")
            ),
            None if role == Role::Spare => {
                bail!("no such spare runs on this host (`hotspare status`)")
            }
            None => {
                bail!("no such guest runs on this host; ask on the primary (`hotspare status`)")
            }
        }
    }
}

/// The reason in an answer.
fn words(status: &Status) -> anyhow::Error {
    match status.message() {
        "" => anyhow::anyhow!("{}", status.code().description()),
        message => anyhow::anyhow!("{message}"),
    }
}

/// The status of an agent; the outer error if it does not answer.
fn ask_status(agent: &Agent) -> anyhow::Result<Result<StatusResponse, Status>> {
    let asking = async |mut client: super::ask::Client| {
        let answer = tokio::time::timeout(PATIENCE, client.status(StatusRequest {})).await;
        answer.map(|answer| answer.map(tonic::Response::into_inner))
    };
    ask(agent, asking)?.context("no answer")
}

/// The agents of this host that answer. Those that do not are told of, if they live.
fn of_this_host() -> anyhow::Result<Vec<(Agent, StatusResponse)>> {
    let mut agents = Vec::new();
    let entries = match std::fs::read_dir(DIRECTORY) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(agents),
        Err(error) => return Err(error).with_context(|| format!("look into {DIRECTORY}")),
    };
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_none_or(|end| end != "sock") {
            continue;
        }
        if UnixStream::connect(&path).is_err() {
            if is_gone(&path) {
                // Left behind by an agent that was killed.
                drop(std::fs::remove_file(&path));
            }
            continue;
        }
        let agent = Agent::Here(path.clone());
        match ask_status(&agent) {
            Ok(Ok(status)) => agents.push((agent, status)),
            // It has ended just now.
            _ if is_gone(&path) => {}
            Ok(Err(status)) => tell_silent(&path, &words(&status).to_string()),
            Err(error) => tell_silent(&path, &format!("{error:#}")),
        }
    }
    Ok(agents)
}

fn tell_silent(path: &Path, why: &str) {
    let agent = path.file_stem().unwrap_or_default().to_string_lossy();
    eprintln!(
        "hotspare: the agent with pid {agent} has not answered for {} s ({why}): is it stopped \
         (`ps -o stat {agent}` says T)? Then `kill -CONT {agent}`. Or is it of another version?",
        PATIENCE.as_secs()
    );
}

/// Whether the agent that made this socket has ended.
fn is_gone(socket: &Path) -> bool {
    let pid = socket.file_stem().unwrap_or_default();
    !Path::new("/proc").join(pid).exists()
}

fn role(status: &StatusResponse) -> &'static str {
    match status.role() {
        Role::Primary => "primary",
        Role::Spare => "spare",
        Role::Unspecified => "?",
    }
}

/// A name that may be missing.
fn guest(status: &StatusResponse) -> &str {
    if status.guest.is_empty() { "-" } else { &status.guest }
}

/// `hotspare status`.
pub fn status(place: &Where, json: bool) -> anyhow::Result<u8> {
    let agents: Vec<StatusResponse> =
        place.agents()?.into_iter().map(|(_, status)| status).collect();
    if json {
        agents.iter().for_each(|status| println!("{}", in_json(status)));
    } else if agents.is_empty() {
        println!("no agent runs on this host");
    } else {
        print!("{}", table(&agents));
        for status in &agents {
            status.store.iter().for_each(|words| println!("{}: {words}", guest(status)));
        }
    }
    Ok(0)
}

fn in_json(status: &StatusResponse) -> Value {
    json!({
        "pid": status.pid,
        "guest": guest(status),
        "role": role(status),
        "term": status.term,
        "epoch": status.epoch,
        "spares": status.spares,
        "ready": status.ready,
        "standing_by": status.standing_by,
        "paused": status.paused,
        "pause_p50_us": status.pause_p50_us,
        "pause_p99_us": status.pause_p99_us,
        "version": status.version,
        "arbiter": status.arbiter,
        "lease_ms": status.lease_ms,
        "ghost_of": status.ghost_of,
        "store": status.store,
    })
}

/// One line for each agent, under a head.
fn table(agents: &[StatusResponse]) -> String {
    let pause = |status: &StatusResponse| match status.pause_p50_us {
        p50 if p50 > 0.0 => format!("{p50:.0}/{:.0} µs", status.pause_p99_us),
        _ => "-".to_owned(),
    };
    let spares = |status: &StatusResponse| match (status.role(), status.paused) {
        (Role::Primary, true) => "PAUSED".to_owned(),
        (Role::Primary, false) => match status.standing_by {
            0 => format!("{} of {} ready", status.ready, status.spares),
            by => format!("{} of {} ready, {by} standing by", status.ready, status.spares),
        },
        _ => "-".to_owned(),
    };
    let lease = |status: &StatusResponse| match (status.lease_ms, status.role()) {
        (Some(0), Role::Primary) => "over".to_owned(),
        (Some(ms), Role::Primary) => format!("{:.1} s", ms as f64 / 1000.0),
        _ => "-".to_owned(),
    };
    let head = ["GUEST", "ROLE", "PID", "TERM", "EPOCH", "SPARES", "LEASE", "PAUSE p50/p99"];
    let mut rows = vec![head.map(str::to_owned)];
    rows.extend(agents.iter().map(|status| {
        let [pid, term, epoch] = [u64::from(status.pid), status.term, status.epoch];
        let (guest, role) = (guest(status).to_owned(), role(status).to_owned());
        let [pid, term, epoch] = [pid, term, epoch].map(|number| number.to_string());
        [guest, role, pid, term, epoch, spares(status), lease(status), pause(status)]
    }));
    columns(&rows)
}

/// Rows with their cells below each other.
pub fn columns<const N: usize>(rows: &[[String; N]]) -> String {
    let width = |column: usize| {
        rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default()
    };
    let widths: Vec<usize> = (0..N).map(width).collect();
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

/// Fails if a guest of this name runs on this host.
pub fn require_free_name(guest: &str) -> anyhow::Result<()> {
    let mut taken = of_this_host()?.into_iter().map(|(_, status)| status);
    if let Some(other) =
        taken.find(|status| status.guest == guest && status.role() == Role::Primary)
    {
        bail!(
            "a guest named {guest:?} runs on this host already (pid {}): give this one another \
             name with --guest",
            other.pid
        );
    }
    Ok(())
}

/// `hotspare switchover`: asks the primary.
pub fn switchover(place: &Where, guest: Option<&str>, to: Option<IpAddr>) -> anyhow::Result<u8> {
    let agent = place.one(guest, Role::Primary)?;
    let outcome = ask(&agent, async |mut client| {
        let mut words = client
            .switchover(SwitchoverRequest { to: to.map(|to| to.to_string()) })
            .await?
            .into_inner();
        words.message().await
    })?;
    let why = match outcome {
        Ok(Some(moved)) => {
            let (stall, epoch) = (moved.stall_ms, moved.epoch);
            println!("moved at epoch {epoch}: the guest stood still for {stall:.1} ms");
            return Ok(0);
        }
        Err(status) if status.code() == Code::FailedPrecondition => status.message().to_owned(),
        _ => "the primary ended without an answer; look at `hotspare status` on the host of the \
              spare"
            .to_owned(),
    };
    eprintln!("hotspare: the guest was not moved: {why}");
    Ok(NOT_DONE)
}

/// Exit status of a rehearsal that did not come to an end.
const NOT_TRIED: u8 = 2;

/// `hotspare rehearse`: asks a spare.
pub fn rehearse(place: &Where, guest: Option<&str>, plan: Plan, json: bool) -> anyhow::Result<u8> {
    let agent = place.one(guest, Role::Spare)?;
    let request = RehearseRequest {
        probe: plan.probe,
        run_ms: Some(plan.run.as_millis() as u64),
        patience_ms: Some(plan.patience.as_millis() as u64),
        scratch: plan.scratch.map(|path| path.to_string_lossy().into_owned()),
    };
    let outcome = ask(&agent, async |mut client| client.rehearse(request).await)?;
    match outcome.map(tonic::Response::into_inner) {
        Ok(shown) => {
            match json {
                true => println!("{}", shown.json),
                false => print!("{}", shown.text),
            }
            Ok(if shown.passed { 0 } else { NOT_DONE })
        }
        Err(status) => {
            eprintln!("hotspare: nothing was tried: {:#}", words(&status));
            Ok(NOT_TRIED)
        }
    }
}

/// `hotspare pause` and `hotspare resume`.
pub fn protection(
    place: &Where,
    guest: Option<&str>,
    wanted: bool,
    reason: &str,
) -> anyhow::Result<u8> {
    let agent = place.one(guest, Role::Primary)?;
    let reason = reason.to_owned();
    let outcome = ask(&agent, async |mut client| match wanted {
        true => client.resume_protection(ResumeProtectionRequest {}).await.map(drop),
        false => client.pause_protection(PauseProtectionRequest { reason }).await.map(drop),
    })?;
    match outcome {
        Ok(()) if wanted => println!("the guest is protected again once a spare has a full copy"),
        Ok(()) => println!(
            "the guest runs UNPROTECTED: if this host dies it is lost; `hotspare resume` ends that"
        ),
        Err(status) => {
            eprintln!("hotspare: {:#}", words(&status));
            return Ok(NOT_DONE);
        }
    }
    Ok(0)
}

/// `hotspare events`: until the agent ends.
pub fn events(place: &Where, guest: Option<&str>, epochs: bool, json: bool) -> anyhow::Result<u8> {
    let mut agents = place.agents()?;
    agents.retain(|(_, status)| guest.is_none_or(|guest| status.guest == guest));
    let (agent, more) = (agents.pop(), agents.len());
    let Some((agent, _)) = agent.filter(|_| more == 0) else {
        bail!("{more} agents more than one: name a guest with --guest (`hotspare status`)");
    };
    ask(&agent, async |mut client| {
        let mut stream = client.events(EventsRequest { epochs }).await?.into_inner();
        while let Some(event) = stream.message().await? {
            println!("{}", if json { event_in_json(&event).to_string() } else { told(&event) });
        }
        Ok::<_, Status>(())
    })?
    .map_err(|status| words(&status).context("the agent has ended"))?;
    Ok(0)
}

fn event_in_json(event: &Event) -> Value {
    let mut value = match &event.what {
        Some(event::What::Record(record)) => {
            return serde_json::from_str(&record.json).unwrap_or(Value::Null);
        }
        Some(event::What::Note(note)) => {
            json!({"event": "note", "priority": note.priority, "text": note.text})
        }
        Some(event::What::Epoch(epoch)) => json!({
            "event": "epoch", "epoch": epoch.epoch, "pause_us": epoch.pause_us,
            "pages": epoch.pages, "bytes": epoch.bytes, "lag": epoch.lag,
        }),
        Some(event::What::Missed(missed)) => json!({"event": "missed", "missed": missed}),
        None => json!({"event": "unknown to this version"}),
    };
    value["wall_ms"] = event.wall_ms.into();
    value
}

fn told(event: &Event) -> String {
    let at = history::utc(std::time::Duration::from_millis(event.wall_ms));
    match &event.what {
        Some(event::What::Record(record)) => format!("{at} {}: {}", record.guest, record.words),
        Some(event::What::Note(note)) => format!("{at} {}", note.text),
        Some(event::What::Epoch(epoch)) => format!(
            "{at} epoch {}: pause {:.0} µs, {} pages, {} bytes, {} behind",
            epoch.epoch, epoch.pause_us, epoch.pages, epoch.bytes, epoch.lag
        ),
        Some(event::What::Missed(missed)) => format!("({missed} events were too many)"),
        None => format!("{at} (unknown to this version)"),
    }
}

/// `hotspare history --at`: that of another host's agent. None if this host is meant.
pub fn history(place: &Where, json: bool) -> anyhow::Result<Option<u8>> {
    let Some(agent) = place.elsewhere()? else { return Ok(None) };
    let answer =
        ask(&agent, async |mut client| client.history(HistoryRequest { newest: 0 }).await)?;
    let records = answer.map_err(|status| words(&status))?.into_inner().records;
    let lines: Vec<&str> = records.iter().map(|record| &*record.json).collect();
    history::print(&lines, json).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_guests_are_told_in_columns() {
        let primary = StatusResponse {
            guest: "redis".into(),
            role: Role::Primary.into(),
            pid: 7,
            term: 1,
            epoch: 1234,
            spares: 2,
            ready: 1,
            lease_ms: Some(812),
            pause_p50_us: 812.4,
            pause_p99_us: 2000.0,
            ..StatusResponse::default()
        };
        let spare =
            StatusResponse { role: Role::Spare.into(), pid: 31234, ..StatusResponse::default() };
        let three = StatusResponse { spares: 3, standing_by: 2, ..primary.clone() };
        let paused = StatusResponse { guest: "kv".into(), paused: true, ..primary.clone() };
        let expected = "\
GUEST  ROLE     PID    TERM  EPOCH  SPARES                       LEASE  PAUSE p50/p99
redis  primary  7      1     1234   1 of 2 ready                 0.8 s  812/2000 µs
redis  primary  7      1     1234   1 of 3 ready, 2 standing by  0.8 s  812/2000 µs
-      spare    31234  0     0      -                            -      -
kv     primary  7      1     1234   PAUSED                       0.8 s  812/2000 µs
";
        assert_eq!(table(&[primary, three, spare, paused]), expected);
    }
}
