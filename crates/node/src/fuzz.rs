//! What this program itself reads of others, damaged: for two seconds, or
//! `HOTSPARE_FUZZ_SECONDS`. A failure names the seed.

use std::time::Duration;

use hotspare_cluster::register::Record as Register;
use hotspare_image::{NodeId, Term};
use hotspare_replica::fuzz::{Dice, damage, run};

use crate::arbiter::record;
use crate::history::Record;
use crate::rehearsal::frame_is_read;
use crate::settings::Settings;

const KEY: &str = "/hotspare/redis";

fn register(dice: &mut Dice) -> Register {
    Register {
        term: Term(dice.roll()),
        holder: NodeId(dice.roll()),
        lease_ns: dice.roll(),
        grace_ns: dice.roll(),
        renewals: dice.roll(),
        heirs: (0..dice.below(4)).map(|_| NodeId(dice.roll())).collect(),
        at_once: dice.below(2) == 0,
        shared: dice.below(2) == 0,
        over: dice.below(2) == 0,
    }
}

/// The arbiter's record: what is read of damaged bytes can be written and read again.
fn arbiter_record(seed: u64) -> (bool, u64) {
    let mut dice = Dice(seed);
    let written = register(&mut dice);
    let mut bytes = record::seal(KEY, &written);
    assert_eq!(record::open(&bytes, KEY), Ok(written));
    for _ in 0..1 + dice.below(3) {
        damage(&mut bytes, &mut dice);
    }
    let Ok(read) = record::open(&bytes, KEY) else { return (true, 0) };
    assert_eq!(record::open(&record::seal(KEY, &read), KEY), Ok(read));
    (false, 1)
}

/// Settings come from the primary as pairs of texts.
fn settings(seed: u64) -> (bool, u64) {
    let mut dice = Dice(seed);
    let all = [
        ("guest", "redis"),
        ("epoch-us", "100000"),
        ("service", "10.0.0.5/24"),
        ("service", "fd00::5/64"),
        ("files", "replicate:/srv/redis"),
        ("files", "shared:/mnt"),
        ("guarantee", "output-commit"),
        ("arbiter", "etcd:hotspare"),
        ("path", "direct"),
    ];
    let pairs: Vec<(String, String)> = (0..1 + dice.below(6))
        .map(|_| {
            let (name, value) = all[dice.below(all.len())];
            let (mut name, mut value) = (name.as_bytes().to_vec(), value.as_bytes().to_vec());
            match dice.below(6) {
                0 => damage(&mut name, &mut dice),
                1 | 2 => damage(&mut value, &mut dice),
                _ => {}
            }
            let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
            (text(name), text(value))
        })
        .collect();
    let Ok(read) = Settings::from_pairs(&pairs) else { return (true, 0) };
    let again = Settings::from_pairs(&read.to_pairs()).expect("what was read can be told");
    assert_eq!(again, read);
    (false, 1)
}

/// Lines of a history come from another host, too (`history --at`).
fn history(seed: u64) -> (bool, u64) {
    let mut dice = Dice(seed);
    let what = crate::history::What::Unprotected { why: "no spare".into() };
    let record = Record::now("alpha", NodeId(dice.roll()), "redis", (1, 2), what);
    let mut bytes = record.to_line().into_bytes();
    damage(&mut bytes, &mut dice);
    let Ok(read) = serde_json::from_slice::<Record>(&bytes) else { return (true, 0) };
    let _ = read.words();
    (false, 1)
}

#[test]
fn fuzz_what_this_program_reads_of_others() {
    let seconds = std::env::var("HOTSPARE_FUZZ_SECONDS").ok();
    let seconds: f64 = seconds.and_then(|text| text.parse().ok()).unwrap_or(2.0);
    let each = Duration::from_secs_f64(seconds / 4.0);
    for (name, target) in [
        ("arbiter-record", arbiter_record as fn(u64) -> (bool, u64)),
        ("settings", settings),
        ("history", history),
        ("stage", frame_is_read),
    ] {
        let report = run(name, target, 1, each);
        println!("{name}: {report:?}");
        let both = report.refused > 10 && report.committed > 10;
        assert!(both && report.cases > 100, "{name}: {report:?}");
    }
}
