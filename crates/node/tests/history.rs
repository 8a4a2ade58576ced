//! What happened to a guest is kept on the host that saw it, whatever becomes of the disk.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use hotspare_torture::Lab;
use hotspare_torture::chain::{Scene, says};
use hotspare_torture::lab::Host;
use hotspare_torture::protected::{Engine, HANG};
use nix::mount::{MsFlags, mount};
use serde_json::Value;

const BINARY: &str = env!("CARGO_BIN_EXE_hotspare");
/// What is remembered is looked at here, and a busy machine is to add nothing to it.
const PATIENT: [&str; 2] = ["--silence", "500ms"];

fn engine() -> Engine {
    Engine {
        binary: BINARY.into(),
        epoch: Duration::from_millis(50),
        service_cidr: None,
        replicated: vec![],
        more: ["--guest", "sleeper"].iter().chain(&PATIENT).map(|word| (*word).into()).collect(),
    }
}

fn sleeper() -> Vec<String> {
    vec!["sleep".into(), "1000".into()]
}

fn records(host: &Host) -> Vec<Value> {
    let mut command = Command::new(BINARY);
    let told = host.run(command.args(["history", "--guest", "sleeper", "--json"]), HANG);
    let lines = told.unwrap_or_default();
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Waits until the history of a host has such an event; the events up to it, and its record.
fn comes_to(host: &Host, event: &str) -> (Vec<String>, Value) {
    let deadline = Instant::now() + HANG;
    loop {
        let records = records(host);
        let at = records.iter().position(|record| record["event"] == event);
        if let Some(at) = at {
            let name = |record: &Value| record["event"].as_str().unwrap().to_owned();
            return (records[..=at].iter().map(name).collect(), records[at].clone());
        }
        assert!(Instant::now() < deadline, "no {event:?} in {records:#?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_failover_is_remembered_where_it_was_seen() {
    let (lab, engine) = (Lab::new(2).unwrap(), engine());
    let spare = engine.spare_with(lab.host(1), &PATIENT).unwrap();
    let primary = engine.run(lab.host(0), &[lab.host(1)], &sleeper()).unwrap();
    Engine::protected(&primary).unwrap();
    assert_eq!(comes_to(lab.host(0), "protected").0, ["started", "protected"]);
    lab.cut(lab.host(0), lab.host(1)).unwrap();
    let (failover, _) = Engine::taken_over(&spare).unwrap();
    let (events, record) = comes_to(lab.host(1), "failover");
    assert_eq!(events, ["failover"]);
    assert_eq!(record["cause"], "the primary was silent");
    assert_eq!((&record["term"], &record["epoch"]), (&2.into(), &failover.epoch.into()));
    assert_eq!(record["guarantee"], "timeline");
    for part in ["detect_ms", "apply_ms", "finalise_ms", "address_ms", "epoch_age_ms"] {
        assert!(record[part].as_f64().is_some(), "{part}: {record}");
    }
    let lost = record["lost"].as_str().unwrap();
    assert!(lost.contains(&format!("checkpoint {}", failover.epoch)), "{lost}");
    assert!(lost.contains("cut off"), "the old primary may live: {lost}");

    // The old one hears of it.
    lab.heal().unwrap();
    let (events, record) = comes_to(lab.host(0), "fenced");
    assert_eq!(events[..2], ["started", "protected"], "{events:?}");
    assert!(record["cause"].as_str().unwrap().contains("term 2"), "{record}");
    assert_eq!(primary.wait(HANG).unwrap().code(), Some(75));

    let table = lab.host(1).run(Command::new(BINARY).arg("history"), HANG).unwrap();
    for part in ["WHEN (UTC)", "sleeper", "FAILOVER to this host: the primary was silent"] {
        assert!(table.contains(part), "{part}: {table}");
    }
}

#[test]
fn a_switchover_is_remembered_on_both_hosts() {
    let mut scene = Scene::new(2, Duration::from_millis(50));
    scene.engine = engine();
    let _spare = scene.engine.spare_with(scene.host(1), &PATIENT).unwrap();
    let primary = scene.engine.run(scene.host(0), &[scene.host(1)], &sleeper()).unwrap();
    Engine::protected(&primary).unwrap();
    let said = scene.hotspare(0, &["switchover"]);
    assert!(said.is_ok(), "{said:?}\n{}", primary.said());
    let (events, away) = comes_to(scene.host(0), "switched-away");
    assert_eq!(events, ["started", "protected", "switched-away"]);
    let (events, here) = comes_to(scene.host(1), "switched-here");
    assert_eq!(events, ["switched-here"]);
    assert_eq!(away["epoch"], here["epoch"]);
    assert!(away["stall_ms"].as_f64().is_some_and(|stall| stall > 0.0), "{away}");
    assert_eq!(here["term"], 2);
}

/// The guest and its protection do not care, the operator is told, and nothing is forgotten.
#[test]
fn a_full_disk_is_told_and_the_records_are_kept_until_there_is_room() {
    let (lab, mut engine) = (Lab::new(2).unwrap(), engine());
    let state = PathBuf::from("/srv/hotspare-lab/state");
    let filler = state.join("filler");
    let (made, full) = (state.clone(), filler.clone());
    let fill = move || {
        std::fs::create_dir(&made).unwrap();
        let size = Some("size=8k,mode=700");
        mount(Some("tmpfs"), &made, Some("tmpfs"), MsFlags::empty(), size).unwrap();
        std::fs::create_dir(made.join("sleeper")).unwrap();
        let filled = std::fs::write(&full, [1u8; 1 << 20]);
        assert_eq!(filled.unwrap_err().kind(), std::io::ErrorKind::StorageFull);
    };
    lab.host(0).inside(fill);
    engine.more.extend(["--state-dir".into(), state.display().to_string()]);
    let spare = engine.spare_with(lab.host(1), &PATIENT).unwrap();
    let guest = "while [ ! -e /srv/hotspare-lab/end ]; do sleep 0.02; done; exit 3";
    let guest = ["sh", "-c", guest].map(str::to_owned);
    let primary = engine.run(lab.host(0), &[lab.host(1)], &guest).unwrap();
    Engine::protected(&primary).unwrap();
    says(&primary, "No space left on device");
    lab.host(0).inside(move || std::fs::remove_file(filler).unwrap());
    std::fs::write(lab.host(0).outside("/srv/hotspare-lab/end"), "").unwrap();
    assert_eq!(primary.wait(HANG).unwrap().code(), Some(3), "{}", primary.said());
    let mut command = Command::new(BINARY);
    command.args(["history", "--json", "--state-dir"]).arg(&state);
    let told = lab.host(0).run(&mut command, HANG).unwrap();
    let events: Vec<Value> =
        told.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).collect();
    let events: Vec<&str> = events.iter().map(|line| line["event"].as_str().unwrap()).collect();
    assert_eq!((events[0], *events.last().unwrap()), ("started", "ended"), "{events:?}");
    assert!(events.contains(&"protected"), "{events:?}");
    drop(spare);
}
