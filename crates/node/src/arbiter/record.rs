//! A record as text that a person can read and a program of another version too.

use std::collections::BTreeSet;

use hotspare_cluster::register::Record;
use hotspare_image::{NodeId, Term};
use serde::{Deserialize, Serialize};

const FORMAT: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Text {
    format: u32,
    key: String,
    term: u64,
    /// Nodes are numbers of 64 bits, which not every reader of JSON can hold: in hex.
    holder: String,
    heirs: Vec<String>,
    at_once: bool,
    shared: bool,
    over: bool,
    lease_ns: u64,
    grace_ns: u64,
    renewals: u64,
}

/// As it is stored.
pub fn seal(key: &str, record: &Record) -> Vec<u8> {
    let name = |node: &NodeId| format!("{:016x}", node.0);
    let text = Text {
        format: FORMAT,
        key: key.to_owned(),
        term: record.term.0,
        holder: name(&record.holder),
        heirs: record.heirs.iter().map(name).collect(),
        at_once: record.at_once,
        shared: record.shared,
        over: record.over,
        lease_ns: record.lease_ns,
        grace_ns: record.grace_ns,
        renewals: record.renewals,
    };
    serde_json::to_vec(&text).expect("text and numbers can be written as JSON")
}

/// What was stored, or why that cannot be.
pub fn open(bytes: &[u8], key: &str) -> Result<Record, String> {
    let wrong = |why: String| {
        format!(
            "what the arbiter holds at {key} is no record of Hotspare ({why}): is the prefix \
             somebody else's? If not, make sure that the guest runs nowhere, and delete it there"
        )
    };
    let text: Text = serde_json::from_slice(bytes).map_err(|error| wrong(error.to_string()))?;
    if text.format != FORMAT {
        return Err(wrong(format!("format {}, this program knows {FORMAT}", text.format)));
    }
    if text.key != key {
        return Err(wrong(format!("it says that it belongs at {}", text.key)));
    }
    let node = |name: &String| {
        let number = u64::from_str_radix(name, 16).map_err(|error| wrong(error.to_string()));
        number.map(NodeId)
    };
    Ok(Record {
        term: Term(text.term),
        holder: node(&text.holder)?,
        lease_ns: text.lease_ns,
        grace_ns: text.grace_ns,
        renewals: text.renewals,
        heirs: text.heirs.iter().map(node).collect::<Result<BTreeSet<_>, _>>()?,
        at_once: text.at_once,
        shared: text.shared,
        over: text.over,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = include_str!("../../../../docs/formats/arbiter.md");

    /// The line of the page that is to be what this program writes.
    fn golden() -> &'static str {
        let (_, block) = PAGE.split_once("```golden\n").expect("a golden block");
        block.split_once("\n```").expect("its end").0
    }

    #[test]
    fn the_golden_record_of_the_page_is_what_the_code_writes() {
        let record = Record {
            term: Term(7),
            holder: NodeId(0xff),
            lease_ns: 1_000_000_000,
            grace_ns: 60_000_000_000,
            renewals: 3,
            heirs: [NodeId(1), NodeId(2)].into(),
            at_once: true,
            shared: false,
            over: false,
        };
        let written = String::from_utf8(seal("/hotspare/redis", &record)).unwrap();
        assert_eq!(golden(), written);
        assert_eq!(open(golden().as_bytes(), "/hotspare/redis"), Ok(record));
    }

    #[test]
    fn the_table_of_the_page_has_the_fields_of_the_record_in_their_order() {
        let rows = PAGE.lines().filter_map(|line| line.strip_prefix("| `"));
        let named: Vec<&str> = rows.filter_map(|row| Some(row.split_once('`')?.0)).collect();
        let place = |name: &&str| golden().find(&format!("\"{name}\":")).expect("it is written");
        assert!(named.is_sorted_by_key(place), "{named:?}");
        let fields: serde_json::Value = serde_json::from_str(golden()).unwrap();
        assert_eq!(named.len(), fields.as_object().unwrap().len());
        // What the page says is needed is needed, and more does no harm.
        for name in named {
            let mut less = fields.clone();
            less.as_object_mut().unwrap().remove(name);
            assert!(open(less.to_string().as_bytes(), "/hotspare/redis").is_err(), "{name}");
        }
        let mut more = fields;
        more["later"] = "x".into();
        assert!(open(more.to_string().as_bytes(), "/hotspare/redis").is_ok());
        assert!(PAGE.contains(&format!("# The arbiter's record, format {FORMAT}\n")));
    }

    #[test]
    fn a_record_is_read_as_written_and_nothing_else_is() {
        let record = Record {
            term: Term(7),
            holder: NodeId(u64::MAX),
            lease_ns: 1,
            grace_ns: 2,
            renewals: 3,
            heirs: [NodeId(1), NodeId(2)].into(),
            at_once: true,
            shared: false,
            over: false,
        };
        let bytes = seal("/x/redis", &record);
        assert_eq!(open(&bytes, "/x/redis"), Ok(record));
        assert!(open(&bytes, "/x/nginx").is_err_and(|why| why.contains("belongs at")));
        let newer =
            String::from_utf8(bytes.clone()).unwrap().replace("\"format\":1", "\"format\":2");
        assert!(open(newer.as_bytes(), "/x/redis").is_err_and(|why| why.contains("format 2")));
        for length in 0..bytes.len() {
            assert!(open(&bytes[..length], "/x/redis").is_err());
        }
    }
}
