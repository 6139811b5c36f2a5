"""Which methods of the eight classes change their world. Whatever is not listed here counts as a change.

The lists were read off the sources and hold for all arguments, not only for those of the ground truth. Three
methods look like reads and are not listed, because something in the world is different afterwards:
`get_current_speed` and `get_outside_temperature_from_google` draw from the car's random generator, so the next draw
differs, and `get_flight_cost` replaces a price cache. `cd` moves the working directory, and the logins log in.
"""

from typing import Literal

READ_ONLY: dict[str, frozenset[str]] = {
    "GorillaFileSystem": frozenset({"cat", "diff", "du", "find", "grep", "ls", "pwd", "sort", "tail", "wc"}),
    "MathAPI": frozenset(
        {
            *("absolute_value", "add", "divide", "imperial_si_conversion", "logarithm", "max_value", "mean"),
            *("min_value", "multiply", "percentage", "power", "round_number", "si_unit_conversion"),
            *("square_root", "standard_deviation", "subtract", "sum_values"),
        }
    ),
    "MessageAPI": frozenset(
        {
            *("get_message_stats", "get_user_id", "list_users", "message_get_login_status"),
            *("search_messages", "view_messages_sent"),
        }
    ),
    "TicketAPI": frozenset({"get_ticket", "get_user_tickets", "ticket_get_login_status"}),
    "TradingBot": frozenset(
        {
            *("filter_stocks_by_price", "get_account_info", "get_available_stocks", "get_current_time"),
            *("get_order_details", "get_order_history", "get_stock_info", "get_symbol_by_name"),
            *("get_transaction_history", "get_watchlist", "notify_price_change", "trading_get_login_status"),
        }
    ),
    "TravelAPI": frozenset(
        {
            *("compute_exchange_rate", "contact_customer_support", "get_all_credit_cards", "get_booking_history"),
            *("get_budget_fiscal_year", "get_credit_card_balance", "get_nearest_airport_by_city"),
            *("list_all_airports", "retrieve_invoice", "travel_get_login_status", "verify_traveler_information"),
        }
    ),
    "TwitterAPI": frozenset(
        {
            *("get_tweet", "get_tweet_comments", "get_user_stats", "get_user_tweets", "list_all_following"),
            *("posting_get_login_status", "search_tweets"),
        }
    ),
    "VehicleControlAPI": frozenset(
        {
            *("check_tire_pressure", "display_log", "displayCarStatus", "estimate_distance"),
            *("estimate_drive_feasibility_by_mileage", "find_nearest_tire_shop", "gallon_to_liter"),
            *("get_outside_temperature_from_weather_com", "get_zipcode_based_on_city", "liter_to_gallon"),
        }
    ),
}


def effect_of(api: str, method: str) -> Literal["read_only", "non_idempotent"]:
    """The effect class that a tool for this method declares."""
    return "read_only" if method in READ_ONLY.get(api, ()) else "non_idempotent"
