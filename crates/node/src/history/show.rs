//! `hotspare history`.

use std::path::{Path, PathBuf};

use anyhow::Context;

use super::disk;
use super::record::Record;

/// Exit status where there is nothing to show.
const NOTHING: u8 = 1;

/// A file, and how many of its lines are torn.
pub type Torn = (PathBuf, usize);

/// The records below `state`, of one guest or all, oldest first; and the files with torn lines.
pub fn read_all(state: &Path, guest: Option<&str>) -> anyhow::Result<(Vec<Record>, Vec<Torn>)> {
    let failed = |path: &Path| format!("read the history in {}", path.display());
    let (mut records, mut torn) = (Vec::new(), Vec::new());
    for path in disk::all(state).with_context(|| failed(state))? {
        let (mut found, bad) = disk::read(&path).with_context(|| failed(&path))?;
        records.append(&mut found);
        if bad > 0 {
            torn.push((path, bad));
        }
    }
    records.retain(|record| guest.is_none_or(|guest| record.guest == guest));
    records.sort_by_key(|record| record.wall_ms);
    Ok((records, torn))
}

/// Shows the history of this host.
pub fn show(state: &Path, guest: Option<&str>, json: bool) -> anyhow::Result<u8> {
    let (records, torn) = read_all(state, guest)?;
    for (path, lines) in torn {
        eprintln!(
            "hotspare: {}: {lines} unreadable line(s), from a crash while it was written: left out",
            path.display()
        );
    }
    told(&records, json);
    if records.is_empty() {
        let of = guest.map(|guest| format!(" of {guest:?}")).unwrap_or_default();
        eprintln!(
            "hotspare: no history{of} in {}: nothing has happened on this host, or its agents were \
             given another --state-dir",
            state.display()
        );
        return Ok(NOTHING);
    }
    Ok(0)
}

fn told(records: &[Record], json: bool) {
    if json {
        records.iter().for_each(|record| println!("{}", record.to_line()));
    } else if !records.is_empty() {
        print!("{}", table(records));
    }
}

/// Shows records that another host has sent, as lines.
pub fn print(lines: &[&str], json: bool) -> anyhow::Result<u8> {
    let read = |line: &&str| serde_json::from_str(line);
    let records: Result<Vec<Record>, _> = lines.iter().map(read).collect();
    let records = records.context("the other host is of a newer version: use --json")?;
    told(&records, json);
    Ok(if records.is_empty() { NOTHING } else { 0 })
}

/// One line for each record, under a head.
fn table(records: &[Record]) -> String {
    let head = ["WHEN (UTC)", "GUEST", "HOST", "TERM", "EPOCH", "WHAT"];
    let mut rows = vec![head.map(str::to_owned)];
    rows.extend(records.iter().map(|record| {
        let when = record.at.replacen('T', " ", 1).trim_end_matches('Z').to_owned();
        let (guest, host) = (record.guest.clone(), record.host.clone());
        [when, guest, host, record.term.to_string(), record.epoch.to_string(), record.words()]
    }));
    crate::control::columns(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::What;
    use hotspare_image::NodeId;

    #[test]
    fn people_see_columns() {
        let mut first = Record::now("alpha", NodeId(7), "redis", (1, 12), What::Protected);
        first.at = "2026-11-22T10:46:03.123Z".into();
        let fenced = What::Fenced { cause: "a newer term".into() };
        let mut second = Record::now("alpha", NodeId(7), "redis", (1, 1300), fenced);
        second.at = "2026-11-22T11:00:00.000Z".into();
        let expected = "\
WHEN (UTC)               GUEST  HOST   TERM  EPOCH  WHAT
2026-11-22 10:46:03.123  redis  alpha  1     12     PROTECTED: a spare could take over from here on
2026-11-22 11:00:00.000  redis  alpha  1     1300   FENCED, stopped here: a newer term
";
        assert_eq!(table(&[first, second]), expected);
    }
}
