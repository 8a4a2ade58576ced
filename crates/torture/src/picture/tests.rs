use super::*;
use crate::dice::Dice;

fn at(ms: f64) -> Instant {
    Instant(1_000_000_000_000 + (ms * 1e6) as u64)
}

/// A made-up failover: dead at 2 s, back after 240 ms, with a backlog worked off.
fn replies() -> Vec<Reply> {
    let mut dice = Dice::new(3);
    let mut replies = Vec::new();
    for number in 0..8000 {
        let due = number as f64 * 0.5;
        let latency =
            0.08 + dice.below(1000) as f64 * 0.0002 + if dice.chance(0.01) { 0.9 } else { 0.0 };
        let stalled = (2000.0..2240.0).contains(&due);
        let done = if stalled { 2240.0 + (due - 2000.0) * 0.1 } else { due + latency };
        let outcome = if stalled && number % 120 == 0 { Outcome::Timeout } else { Outcome::Good };
        let done = if outcome == Outcome::Good { done } else { due + 100.0 };
        replies.push(Reply { due: at(due), sent: at(due), done: at(done), outcome });
    }
    replies
}

fn picture(replies: &[Reply]) -> Picture<'_> {
    let part = |name, ms| Part { name, length: Duration::from_secs_f64(ms / 1e3) };
    Picture {
        title: "redis-server with 100,000 keys & a <load>".to_owned(),
        subtitle: "2,000 requests a second on 8 connections".to_owned(),
        replies,
        death: at(2000.0),
        outage: Some((at(1999.8), at(2240.0))),
        parts: vec![
            part("detect", 92.0),
            part("finalise", 6.5),
            part("address", 0.4),
            part("first reply", 141.0),
        ],
        before: Duration::from_millis(2000),
        after: Duration::from_millis(2000),
    }
}

#[test]
fn a_picture_has_its_parts_and_no_raw_markup() {
    let replies = replies();
    let svg = picture(&replies).svg();
    if let Some(path) = std::env::var_os("HOTSPARE_TEST_PICTURE") {
        std::fs::write(path, &svg).unwrap();
    }
    for said in ["detect 92.0 ms", "address 0.4 ms", "outage 240.2 ms", "100 ms", "&lt;load&gt;"] {
        assert!(svg.contains(said), "{said}");
    }
    assert!(!svg.contains("NaN") && !svg.contains("<load>"));
    assert!(svg.len() < 400_000, "{}", svg.len());
}

#[test]
fn a_picture_without_replies_can_be_drawn() {
    let picture = Picture { outage: None, ..picture(&[]) };
    assert!(!picture.svg().contains("NaN"));
}
